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
from penstock.postgres.database import Database, translate

log = get_logger("penstock.migrate")

OLDEST_SERVER = 15
# Increase PROTOCOL when a function that clients call is added or changed. Set OLDEST_CLIENT to it when one is dropped or changes
# its meaning, so that older clients cannot continue.
PROTOCOL = 1
OLDEST_CLIENT = 1
_LOCK = 0x70656E73
_APPLIED = "select name, checksum, version from penstock.migrations"


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


async def migrate(database: Database) -> Migrated:
    """Create or update the schema `penstock`. Does nothing when it is up to date.

    Raises:
        SchemaMismatch: The server is too old, or the schema belongs to a newer Penstock.
        DatabaseUnavailable: The database cannot be reached.
    """
    connection = await database.connect()
    try:
        async with connection.transaction():
            return await _migrate(database, connection)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
        raise (translate(error) or error) from error
    finally:
        connection.terminate()


async def check(database: Database) -> None:
    """Raise `SchemaMismatch` unless the schema exists and fits this version."""
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


async def _migrate(database: Database, connection: asyncpg.Connection[Any]) -> Migrated:
    server = int(await connection.fetchval("show server_version_num")) // 10_000
    if server < OLDEST_SERVER:
        raise SchemaMismatch(f"PostgreSQL {server} is too old", hint=f"Penstock needs PostgreSQL {OLDEST_SERVER} or newer.")
    await connection.execute("select pg_advisory_xact_lock($1)", _LOCK)
    applied: dict[str, Any] = {}
    if await connection.fetchval("select to_regclass('penstock.migrations') is not null"):
        applied = {row["name"]: row for row in await connection.fetch(_APPLIED)}
        _refuse_other_tables(database, applied)
    await connection.execute((_schema() / "migrations.sql").read_text("utf-8"))

    tables = schema_files("tables")
    if applied:
        stored = await connection.fetchrow("select number, oldest, version from penstock.protocol")
        _refuse_range(stored)
        if stored is not None and (stored["number"] > PROTOCOL or _number(stored["version"]) > _number(__version__)):
            # The schema is newer and serves this version, which must not change it.
            return Migrated(tables=[], functions=False)
    new = [file for file in tables if file.name not in applied]
    for file in new:
        await connection.execute(file.text)
    done = [file.name for file in new]

    functions = schema_files("functions")
    checksum = checksum_of(functions)
    before = applied.get("functions")
    applied_now = before is not None and (before["version"], before["checksum"]) == (__version__, checksum)
    stale = not applied_now and (before is None or _number(before["version"]) <= _number(__version__))
    if stale or done:
        dropped = await _apply_functions(connection, functions)
        await connection.execute("select penstock.set_planner_profiles()")
        await connection.execute("select penstock.refresh_access()")
        await connection.execute("select penstock.ensure_archive(penstock.clock())")
        for file in new:
            await _record(connection, file.name, checksum_of((file,)))
        await _record(connection, "functions", checksum)
        await connection.execute("select penstock.record_protocol($1, $2, $3)", PROTOCOL, OLDEST_CLIENT, __version__)
        # Workers of other versions check whether they can continue.
        await connection.execute("select pg_notify('penstock', 'schema')")
        log.info("migrated", tables=done, functions=stale, dropped=dropped)
    return Migrated(tables=done, functions=stale)


async def _apply_functions(connection: asyncpg.Connection[Any], files: Sequence[SchemaFile]) -> list[str]:
    """Create or replace the functions of the files, and drop the others of the schema. Returns those that were dropped."""
    before = await connection.fetch(
        "select oid, xmin::text as version from pg_proc where pronamespace = 'penstock'::regnamespace"
    )
    await connection.execute("set local check_function_bodies = off")
    try:
        for file in files:
            await _replace(connection, file)
        dropped: list[str] = await connection.fetchval(
            "select penstock.drop_undeclared($1, $2)", [row["oid"] for row in before], [row["version"] for row in before]
        )
    except asyncpg.DependentObjectsStillExistError as error:
        raise SchemaMismatch(
            f"the database uses functions of Penstock that this version drops: {error.detail}",
            hint="Drop what depends on them, or change it, and then run: penstock migrate. Nothing has been changed.",
        ) from error
    return dropped


async def _replace(connection: asyncpg.Connection[Any], file: SchemaFile) -> None:
    while True:
        try:
            async with connection.transaction():
                await connection.execute(file.text)
            return
        except asyncpg.InvalidFunctionDefinitionError as error:
            # `create or replace` cannot change the result, nor the names and defaults of parameters. The hint names the command
            # to run.
            command = re.search(r"DROP FUNCTION .+\)", error.hint or "")
            if command is None:
                raise
            await connection.execute(command[0])


async def _record(connection: asyncpg.Connection[Any], name: str, checksum: str) -> None:
    await connection.execute("select penstock.record_migration($1, $2, $3)", name, checksum, __version__)


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
