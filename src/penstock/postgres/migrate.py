"""Brings the schema in a database to this version.

Tables are in numbered files, which are applied once, in order, and never edited. Functions are in files of a folder for each
capability, all of which are applied again whenever one of them has changed. Their order does not matter: PostgreSQL does not
check the bodies while they are applied, and whatever needs a function at once, such as a trigger, follows it in its file. The
schema belongs to Penstock: a migration drops the functions that no file declares any more. To change or remove a function, edit
its file and nothing else. Functions that other versions still call stay in `functions/kept`. A migration is one transaction under
an advisory lock, so any number of processes may migrate at once, and one that crashes leaves nothing behind. An older Penstock
never overwrites the functions of a newer one, so a rolling deployment may restart its processes in any order.

Compatibility. The functions speak a protocol, which has a number, and serve clients back to an oldest one; a migration records
both in `penstock.protocol`. A process works with every schema whose range contains its own `PROTOCOL`, also with a newer one.
Within one version nothing may differ: other checksums than those of the files mean that two builds have the same version. Tables
of another build cannot be brought up to date, since released files of tables are never edited; such a schema is refused and not
touched.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import asyncpg

from penstock._version import __version__
from penstock.core.logs import get_logger
from penstock.errors import SchemaMismatch
from penstock.postgres.database import Database
from penstock.postgres.pinned import begin_statement, set_statements
from penstock.postgres.suitability import refuse_unsuitable
from penstock.postgres.translation import DRIVER_ERRORS, translate

log = get_logger("penstock.migrate")

OLDEST_SERVER = 15
# Increase PROTOCOL when a function that clients call is added or changed. Set OLDEST_CLIENT to it when one is dropped or changes
# its meaning, so that older clients cannot continue.
PROTOCOL = 1
OLDEST_CLIENT = 1
_LOCK = 0x70656E73
_APPLIED = "select name, checksum, version from penstock.migrations"
# The functions as they are before the files are applied are noted in a setting of the transaction. So a migration is the same
# statements from here and from psql, and asks for no right to make temporary tables.
_NOTE_FUNCTIONS = """\
select count(set_config('penstock.functions_before', functions::text, true))
from (
    select coalesce(jsonb_agg(jsonb_build_array(oid, xmin::text)), '[]') as functions
    from pg_proc
    where pronamespace = 'penstock'::regnamespace
) as noted"""
_DROP_UNDECLARED = """\
select penstock.drop_undeclared(array_agg((function ->> 0)::oid), array_agg(function ->> 1))
from jsonb_array_elements(current_setting('penstock.functions_before')::jsonb) as function"""


@dataclass(frozen=True, slots=True)
class SchemaFile:
    """A file of the schema as this process first read it. Its name is the path below `tables` or `functions`."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Migrated:
    """What a migration did: the numbered files that it applied, and whether it applied the functions again."""

    tables: list[str]
    functions: bool


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """What a migration of the schema as it is now would change.

    Attributes:
        tables: Numbered files that would be applied.
        created: Functions that would be new.
        replaced: Functions that would change.
        dropped: Functions that would be dropped.
        statements: The statements of the migration, in order; none when the schema is up to date.
    """

    tables: list[str]
    created: list[str]
    replaced: list[str]
    dropped: list[str]
    statements: list[str]

    @property
    def script(self) -> str:
        """The statements as one transaction, for psql and whatever else runs SQL."""
        if not self.statements:
            return "-- Nothing to do: the schema penstock is up to date.\n"
        title = f"-- Brings the schema penstock to version {__version__}, from the state in which it was when this was made.\n"
        body = "".join(f"{text.rstrip().removesuffix(';')};\n\n" for text in self.statements)
        begin = f"{begin_statement()};\n{set_statements(OLDEST_SERVER, 'local')};"
        return f"{title}{begin}\n\n{body}commit;\n"


class _Statements:
    """Executes statements on a connection, and keeps those that succeeded."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self.connection = connection
        self.texts: list[str] = []

    async def run(self, text: str) -> None:
        await self.connection.execute(text)
        self.texts.append(text)

    async def run_for(self, text: str) -> Any:
        """Execute a query, and return its value."""
        value = await self.connection.fetchval(text)
        self.texts.append(text)
        return value


async def migrate(database: Database) -> Migrated:
    """Create or update the schema `penstock`. Does nothing when it is up to date.

    Raises:
        SchemaMismatch: The server is too old, or the schema belongs to a newer Penstock.
        PenstockError: The database has another encoding than UTF8.
        DatabaseUnavailable: The database cannot be reached.
    """
    connection = await database.connect()
    try:
        async with connection.transaction():
            await database.pin(connection)
            done, dropped = await _migrate(database, _Statements(connection))
        if done.tables or done.functions:
            log.info("migrated", tables=done.tables, functions=done.functions, dropped=dropped)
        return done
    except DRIVER_ERRORS as error:
        raise (translate(error) or error) from error
    finally:
        connection.terminate()


async def plan(database: Database) -> MigrationPlan:
    """What `migrate` would do now: it runs the migration, and rolls it back. Changes nothing; holds its locks until then.

    Raises:
        SchemaMismatch: The migration would be refused.
        DatabaseUnavailable: The database cannot be reached.
    """
    connection = await database.connect()
    try:
        transaction = connection.transaction()
        await transaction.start()
        await database.pin(connection)
        statements = _Statements(connection)
        before = await _fingerprints(connection)
        done, dropped = await _migrate(database, statements)
        after = await _fingerprints(connection)
        await transaction.rollback()
    except DRIVER_ERRORS as error:
        raise (translate(error) or error) from error
    finally:
        connection.terminate()
    return MigrationPlan(
        tables=done.tables,
        created=sorted(after.keys() - before.keys()),
        replaced=sorted(name for name in before.keys() & after.keys() if before[name] != after[name]),
        dropped=sorted({*dropped, *(before.keys() - after.keys())}),
        statements=statements.texts if done.tables or done.functions else [],
    )


async def check(database: Database) -> None:
    """Raise `SchemaMismatch` unless the schema exists and fits this version, and `PenstockError` in a database without UTF8."""
    await refuse_unsuitable(database)
    known = {file.name: file for file in schema_files("tables")}
    rows = {row["name"]: row for row in await database.fetch(_APPLIED)}
    _refuse_other_tables(database, rows)
    if missing := sorted(known.keys() - rows.keys()):
        raise SchemaMismatch(f"the Penstock schema lacks {', '.join(missing)}", hint="Run: penstock migrate")
    stored = await database.fetchrow("select number, oldest, version from penstock.protocol")
    _refuse_range(stored)
    functions = rows.get("functions")
    if functions is None or stored is None or _number(functions["version"]) < _number(__version__):
        raise SchemaMismatch("the functions of the Penstock schema are older than this version", hint="Run: penstock migrate")
    if functions["version"] == __version__ and functions["checksum"] != checksum_of(schema_files("functions")):
        raise SchemaMismatch(
            f"the functions of the Penstock schema are those of another build of version {__version__}",
            hint="Run penstock migrate with the build that is to be used, and then start that build everywhere.",
        )


async def _migrate(database: Database, statements: _Statements) -> tuple[Migrated, list[str]]:
    """Migrate within the transaction of the connection. Also returns the functions that were dropped."""
    connection = statements.connection
    server = int(await connection.fetchval("show server_version_num")) // 10_000
    if server < OLDEST_SERVER:
        raise SchemaMismatch(f"PostgreSQL {server} is too old", hint=f"Penstock needs PostgreSQL {OLDEST_SERVER} or newer.")
    await refuse_unsuitable(connection)
    await statements.run(f"select pg_advisory_xact_lock({_LOCK})")
    applied: dict[str, Any] = {}
    if await connection.fetchval("select to_regclass('penstock.migrations') is not null"):
        applied = {row["name"]: row for row in await connection.fetch(_APPLIED)}
        _refuse_other_tables(database, applied)
    await statements.run((_schema() / "migrations.sql").read_text("utf-8"))

    tables = schema_files("tables")
    if applied:
        stored = await connection.fetchrow("select number, oldest, version from penstock.protocol")
        _refuse_range(stored)
        if stored is not None and (stored["number"] > PROTOCOL or _number(stored["version"]) > _number(__version__)):
            # The schema is newer and serves this version, which must not change it.
            return Migrated(tables=[], functions=False), []
    new = [file for file in tables if file.name not in applied]
    for file in new:
        await statements.run(file.text)
    done = [file.name for file in new]

    functions = schema_files("functions")
    checksum = checksum_of(functions)
    before = applied.get("functions")
    applied_now = before is not None and (before["version"], before["checksum"]) == (__version__, checksum)
    stale = not applied_now and (before is None or _number(before["version"]) <= _number(__version__))
    dropped: list[str] = []
    if stale or done:
        dropped = await _apply_functions(statements, functions)
        await statements.run("select penstock.set_planner_profiles()")
        await statements.run("select penstock.refresh_access()")
        await statements.run("select penstock.ensure_archive(penstock.clock())")
        # As maintenance does: a database that no worker has seen yet lacks nothing.
        await statements.run("select penstock.ensure_archive(penstock.clock() + interval '1 day')")
        for file in new:
            await _record(statements, file.name, checksum_of((file,)))
        await _record(statements, "functions", checksum)
        await statements.run(f"select penstock.record_protocol({PROTOCOL}, {OLDEST_CLIENT}, {_literal(__version__)})")
        # Workers of other versions check whether they can continue.
        await statements.run("select pg_notify('penstock', 'schema')")
    return Migrated(tables=done, functions=stale), dropped


async def _apply_functions(statements: _Statements, files: Sequence[SchemaFile]) -> list[str]:
    """Create or replace the functions of the files, and drop the others of the schema. Returns those that were dropped."""
    await statements.run(_NOTE_FUNCTIONS)
    await statements.run("set local check_function_bodies = off")
    try:
        for file in files:
            await _replace(statements, file)
        dropped: list[str] = await statements.run_for(_DROP_UNDECLARED)
    except asyncpg.DependentObjectsStillExistError as error:
        raise SchemaMismatch(
            f"the database uses functions of Penstock that this version drops: {error.detail}",
            hint="Drop what depends on them, or change it, and then run: penstock migrate. Nothing has been changed.",
        ) from error
    return dropped


async def _replace(statements: _Statements, file: SchemaFile) -> None:
    while True:
        try:
            async with statements.connection.transaction():
                await statements.run(file.text)
            return
        except asyncpg.InvalidFunctionDefinitionError as error:
            # `create or replace` cannot change the result, nor the names and defaults of parameters. The hint names the command
            # to run.
            command = re.search(r"DROP FUNCTION .+\)", error.hint or "")
            if command is None:
                raise
            await statements.run(command[0])


async def _fingerprints(connection: asyncpg.Connection[Any]) -> dict[str, str]:
    """Each function of the schema, with a value that changes with its definition."""
    rows = await connection.fetch(
        """
        select
            oid::regprocedure::text as name,
            md5(concat_ws(
                '|', prosrc, proconfig, prosecdef, provolatile, proargnames, proargmodes, prorettype::regtype, proretset,
                pg_get_expr(proargdefaults, 0)
            )) as fingerprint
        from pg_proc
        where pronamespace = to_regnamespace('penstock')
        """
    )
    return {row["name"]: row["fingerprint"] for row in rows}


async def _record(statements: _Statements, name: str, checksum: str) -> None:
    values = ", ".join(_literal(value) for value in (name, checksum, __version__))
    await statements.run(f"select penstock.record_migration({values})")


def _literal(value: str) -> str:
    """A text of ours, such as the name of a file, as it stands in a script."""
    return "'" + value.replace("'", "''") + "'"


def _refuse_other_tables(database: Database, applied: Mapping[str, Any]) -> None:
    """Refuse a schema whose files of tables differ from those of this build, although no newer version applied them."""
    files = {file.name: file for file in schema_files("tables")}
    differing = [
        name
        for name, row in applied.items()
        if (name in files and row["version"] == __version__ and row["checksum"] != checksum_of((files[name],)))
        or (name not in files and name != "functions" and _number(row["version"]) <= _number(__version__))
    ]
    if not differing:
        return
    if database.data_dir is None:
        place, run, other = "the database", "", "use another database"
    else:
        folder = database.data_dir.resolve()
        place, other = f"the data folder {folder}", "use another folder (PENSTOCK_DATA_DIR)"
        run = f"PENSTOCK_DATA_DIR={shlex.quote(str(folder))} penstock exec "
    raise SchemaMismatch(
        f"the tables of the schema penstock in {place} were made by another build of version {applied[differing[0]]['version']},"
        f" whose files of tables are not those of this one ({', '.join(sorted(differing))}), and cannot be brought up to date",
        hint="Nothing in it has been changed. Use the build that made it, or export what is in it:\n"
        f"  {run}pg_dump --schema=penstock --file=penstock.sql\n"
        "Then drop it:\n"
        f"  {run}psql --command='drop schema penstock cascade'\n"
        f"Or {other}.",
    )


def _refuse_range(stored: Any) -> None:
    if stored is not None and stored["oldest"] > PROTOCOL:
        raise SchemaMismatch(
            f"the Penstock schema is of version {stored['version']} and serves protocols {stored['oldest']} to"
            f" {stored['number']}; this version ({__version__}) speaks {PROTOCOL}",
            hint="Upgrade the package penstock in this environment.",
        )


def _schema() -> Traversable:
    return resources.files("penstock.postgres") / "schema"


@cache
def schema_files(kind: str) -> tuple[SchemaFile, ...]:
    """The files of the schema in a folder, `tables` or `functions`, by name.

    They are read once: when the package is replaced under a running process, its files no longer belong to the code that runs.
    """
    return tuple(sorted(_read(_schema() / kind, ""), key=lambda file: file.name))


def _read(folder: Traversable, path: str) -> Iterator[SchemaFile]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(".sql"):
            yield SchemaFile(path + entry.name, entry.read_text("utf-8"))


@cache
def checksum_of(files: Sequence[SchemaFile]) -> str:
    """The checksum of the names and texts of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.text.encode())
    return digest.hexdigest()


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
