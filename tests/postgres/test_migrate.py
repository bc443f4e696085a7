"""What a migration leaves in the database: the functions of the files and no others, in whatever order these are applied."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

import penstock
from penstock import Penstock, SchemaMismatch
from penstock.postgres import migrate

Sql: TypeAlias = "asyncpg.Connection[Any]"

SCHEMA = Path(penstock.__file__).parent / "postgres" / "schema"
FUNCTIONS = sorted((SCHEMA / "functions").rglob("*.sql"))


async def functions(sql: Sql) -> dict[str, str]:
    """The text of each function."""
    rows = await sql.fetch(
        """
        select oid::regprocedure::text as name, pg_get_functiondef(oid) as text
        from pg_proc
        where pronamespace = 'penstock'::regnamespace
        """
    )
    return {row["name"]: row["text"] for row in rows}


async def test_the_order_of_the_files_of_functions_does_not_matter(url: str, sql: Sql) -> None:
    async with Penstock(url):
        pass
    migrated = await functions(sql)
    await sql.execute("drop schema penstock cascade")
    async with sql.transaction():
        await sql.execute("set local check_function_bodies = off")
        for file in (SCHEMA / "migrations.sql", *sorted((SCHEMA / "tables").iterdir()), *reversed(FUNCTIONS)):
            await sql.execute(file.read_text())
        await sql.execute("select penstock.set_planner_profiles()")
    assert await functions(sql) == migrated


async def test_the_bodies_of_the_functions_are_valid(app: Penstock, sql: Sql) -> None:
    """A migration does not check them, since that would ask for an order."""
    assert len(FUNCTIONS) > 30
    for file in FUNCTIONS:
        await sql.execute(file.read_text())


async def test_each_function_is_declared_once(app: Penstock, sql: Sql) -> None:
    names: list[str] = []
    for file in FUNCTIONS:
        async with sql.transaction():
            before = "select oid, xmin::text from pg_proc where pronamespace = 'penstock'::regnamespace"
            versions = [tuple(row) for row in await sql.fetch(before)]
            await sql.execute(file.read_text())
            names += [oid for oid, version in await sql.fetch(before) if (oid, version) not in versions]
    assert len(names) == len(set(names)) == len(await functions(sql))


async def test_planner_profiles_name_functions_that_exist_and_are_all_used(app: Penstock, sql: Sql) -> None:
    profiles = await sql.fetch("select profile, settings, functions from penstock.planner_profiles()")
    assert all(row["functions"] and row["settings"] for row in profiles)
    named = {name for row in profiles for name in row["functions"]}
    assert named <= {re.sub(r"penstock\.(\w+)\(.*", r"\1", signature) for signature in await functions(sql)}
    # The settings hold, and no function has others of its own.
    wanted: dict[str, set[str]] = {}
    for row in profiles:
        assert len(set(row["functions"])) == len(row["functions"]), row["profile"]
        for name in row["functions"]:
            wanted.setdefault(name, set()).update(row["settings"])
    planned = await sql.fetch(
        """
        select proname, array_agg(setting) as settings
        from pg_proc, unnest(proconfig) as setting
        where pronamespace = 'penstock'::regnamespace and setting ~ '^(enable_|plan_cache_mode)'
        group by oid, proname
        """
    )
    assert {row["proname"]: set(row["settings"]) for row in planned} == wanted


async def make_stale(sql: Sql) -> None:
    """Let the next migration apply the functions again."""
    await sql.execute("update penstock.migrations set checksum = '' where name = 'functions'")


async def rights(sql: Sql) -> dict[str, str]:
    rows = await sql.fetch(
        "select oid::regprocedure::text as name, proacl::text from pg_proc where pronamespace = 'penstock'::regnamespace"
    )
    return {row["name"]: row["proacl"] for row in rows}


async def test_functions_that_no_file_declares_are_dropped_and_all_others_stay_the_same_objects(app: Penstock, sql: Sql) -> None:
    declared = await functions(sql)
    numbers = await sql.fetch("select oid from pg_proc where pronamespace = 'penstock'::regnamespace order by oid")
    await sql.execute(
        """
        create function penstock.claim(p_before integer) returns integer language sql as 'select 1';
        create function penstock."Two words"(p_old integer default penstock.claim(1)) returns integer language sql as 'select 1';
        create procedure penstock.procedure_of_before() language sql as 'select';
        create aggregate penstock.sum_of_before(integer) (sfunc = int4pl, stype = integer);
        create function penstock.check_of_before() returns trigger language plpgsql as 'begin return null; end';
        create trigger check_of_before after insert on penstock.jobs execute function penstock.check_of_before();
        create function public.not_of_penstock() returns trigger language plpgsql as 'begin return null; end';
        create trigger not_of_penstock after insert on penstock.jobs execute function public.not_of_penstock();
        """
    )
    await make_stale(sql)
    await app.migrate()
    assert await functions(sql) == declared
    assert await sql.fetch("select oid from pg_proc where pronamespace = 'penstock'::regnamespace order by oid") == numbers
    triggers = await sql.fetch("select tgname from pg_trigger where tgrelid = 'penstock.jobs'::regclass and not tgisinternal")
    assert {row["tgname"] for row in triggers} == {"not_of_penstock", "jobs_use_retention_classes"}


async def test_a_function_whose_result_or_parameters_change_is_replaced(app: Penstock, sql: Sql) -> None:
    await sql.execute("do $$ begin create role test_reader; exception when duplicate_object then null; end $$")
    await sql.execute("select penstock.grant_access('test_reader', 'reader')")
    declared, granted = await functions(sql), await rights(sql)
    await sql.execute(
        """
        drop function penstock.shown_time(timestamptz), penstock.find_jobs(uuid[], boolean), penstock.why(uuid);
        create function penstock.shown_time(p_time timestamptz) returns integer language sql as 'select 1';
        create function penstock.why(p_other uuid) returns setof uuid language sql as 'select p_other';
        create function penstock.find_jobs(p_ids uuid[], p_log boolean default false) returns table (id uuid)
        language sql as 'select null::uuid';
        """
    )
    await make_stale(sql)
    await app.migrate()
    assert await functions(sql) == declared
    assert await rights(sql) == granted


async def test_a_function_that_something_else_uses_is_not_dropped(app: Penstock, sql: Sql) -> None:
    await sql.execute("create function penstock.before() returns integer language sql as 'select 1'")
    await sql.execute("create view public.mine as select penstock.before()")
    await make_stale(sql)
    found = await functions(sql)
    with pytest.raises(SchemaMismatch, match=r"view public\.mine depends on function penstock\.before\(\)") as refused:
        await app.migrate()
    assert "Drop what depends on them" in str(refused.value)
    assert await functions(sql) == found
    await sql.execute("drop view public.mine")
    await app.migrate()
    assert "penstock.before()" not in await functions(sql)


async def whole_schema(sql: Sql) -> list[Any]:
    """Everything that is in the schema, with the row versions of the catalogue."""
    objects = await sql.fetch(
        """
        select 'class', oid, relname, xmin::text from pg_class where relnamespace = 'penstock'::regnamespace
        union all
        select 'function', oid, proname, xmin::text from pg_proc where pronamespace = 'penstock'::regnamespace
        order by 1, 2
        """
    )
    tables = ("migrations", "protocol", "queued_jobs")
    return [objects, *[await sql.fetch(f"select xmin::text, * from penstock.{table}") for table in tables]]


FILES = [file.name for file in migrate.schema_files("tables")]


@pytest.mark.parametrize(
    ("known", "edited", "unknown"),
    [
        pytest.param([], [], ["0001_jobs.sql", "0002_users.sql", "0017c_protocol.sql"], id="none of the files"),
        pytest.param(FILES, [], ["0012_attempts.sql"], id="a file that this build does not have"),
        pytest.param(FILES[:3], ["0002_jobs.sql"], [], id="a file that differs, and others missing"),
        pytest.param(FILES, ["0002_jobs.sql", "0005_pools.sql"], ["0015_paused_keys.sql"], id="both"),
    ],
)
async def test_a_schema_whose_tables_another_build_made_is_refused_and_not_touched(
    url: str, sql: Sql, known: list[str], edited: list[str], unknown: list[str]
) -> None:
    await sql.execute("drop schema penstock cascade")
    await sql.execute((Path(__file__).parents[1] / "another_build.sql").read_text())
    await sql.execute("delete from penstock.migrations where name <> 'functions'")
    checksums = {file.name: migrate.checksum_of((file,)) for file in migrate.schema_files("tables")}
    await sql.executemany(
        "insert into penstock.migrations (name, checksum, version) values ($1, $2, $3)",
        [(name, "edited" if name in edited else checksums.get(name, "x"), migrate.__version__) for name in (*known, *unknown)],
    )
    found = await whole_schema(sql)
    app = Penstock(url)
    for call in (app.open, app.migrate):
        with pytest.raises(SchemaMismatch) as refused:
            await call()
        said = str(refused.value)
        version, differing = migrate.__version__, ", ".join(sorted([*edited, *unknown]))
        assert (
            f"the tables of the schema penstock in the database were made by another build of version {version}, whose"
            f" files of tables are not those of this one ({differing}), and cannot be brought up to date"
        ) in said
        assert "Nothing in it has been changed. Use the build that made it, or export what is in it:\n  pg_dump" in said
        assert await whole_schema(sql) == found
    # What the message advises is enough.
    await sql.execute("drop schema penstock cascade")
    await app.migrate()
    async with app:
        assert (await functions(sql)).keys() > {"penstock.enqueue_json(text,jsonb)"}


async def test_a_file_of_tables_that_a_newer_version_applied_is_not_another_builds(app: Penstock, sql: Sql) -> None:
    await sql.execute("insert into penstock.migrations (name, checksum, version) values ('9999_second.sql', 'x', '9.0.0')")
    await migrate.check(await app.database())


async def test_a_schema_with_a_newer_protocol_that_serves_this_version_is_not_changed(app: Penstock, sql: Sql) -> None:
    await sql.execute("create function penstock.newer() returns integer language sql as 'select 1'")
    await sql.execute("update penstock.protocol set number = number + 1")
    await make_stale(sql)
    assert await app.migrate() == migrate.Migrated(tables=[], functions=False)
    assert "penstock.newer()" in await functions(sql)


def test_what_is_kept_is_kept_for_clients_that_can_go_on() -> None:
    """`functions/kept/protocol_N.sql` holds what only clients of protocol N call, as long as N is served."""
    for file in (SCHEMA / "functions" / "kept").glob("*.sql"):
        assert migrate.OLDEST_CLIENT <= int(file.stem.removeprefix("protocol_")) < migrate.PROTOCOL, file
