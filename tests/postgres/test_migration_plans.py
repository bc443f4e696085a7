"""What a migration would change, its statements in psql, and a schema whose owner is not the role of the applications."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

from penstock import Job, Penstock, PenstockError, Status
from penstock.postgres import migrate
from penstock.postgres.embedded import wheel_bin_dir
from penstock.testing import running_worker
from tests.command_line import penstock

Sql: TypeAlias = "asyncpg.Connection[Any]"

# Everything that a migration makes, without numbers of rows and objects, and without times.
SCHEMA = (
    "select oid::regprocedure::text, prosrc, proconfig::text, prosecdef, proacl::text, obj_description(oid, 'pg_proc')"
    " from pg_proc where pronamespace = 'penstock'::regnamespace order by 1",
    "select relname, relkind, reloptions::text, relacl::text, obj_description(oid, 'pg_class')"
    " from pg_class where relnamespace = 'penstock'::regnamespace order by 1",
    "select attrelid::regclass::text, attname, atttypid::regtype::text, attnotnull, col_description(attrelid, attnum)"
    " from pg_attribute join pg_class on pg_class.oid = attrelid"
    " where relnamespace = 'penstock'::regnamespace and attnum > 0 order by 1, 2",
    "select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint"
    " where connamespace = 'penstock'::regnamespace order by 1, 2",
    "select name, checksum, version from penstock.migrations order by name",
    "select number, oldest, version from penstock.protocol",
)


async def schema(sql: Sql) -> list[list[tuple[Any, ...]]]:
    return [[tuple(row) for row in await sql.fetch(query)] for query in SCHEMA]


async def in_psql(url: str, script: str) -> None:
    command = [wheel_bin_dir() / "psql", "-X", "--set=ON_ERROR_STOP=1", "--quiet", "--file=-", url]
    done = await asyncio.to_thread(
        subprocess.run, command, input=script, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


async def command(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(penstock, url, *arguments)


async def make_older(sql: Sql) -> None:
    """A schema with functions of an earlier version: one more, one less, one with another result, one with another body."""
    await sql.execute(
        """
        create function penstock.before() returns integer language sql as 'select 1';
        drop function penstock.shown_time(timestamptz), penstock.why(uuid), penstock.job_counts();
        create function penstock.shown_time(p_time timestamptz) returns integer language sql as 'select 1';
        create function penstock.why(p_job uuid) returns setof uuid language sql as 'select p_job';
        update penstock.migrations set checksum = '' where name = 'functions';
        """
    )


async def test_the_statements_make_the_same_schema_in_psql(url: str, sql: Sql, app: Penstock) -> None:
    expected = await schema(sql)
    await sql.execute("drop schema penstock cascade")
    printed = await command(url, "migrate", "--sql")
    assert printed.returncode == 0, printed.stderr
    assert await sql.fetchval("select to_regnamespace('penstock') is null"), "it only prints"
    await in_psql(url, printed.stdout)
    assert await schema(sql) == expected
    assert (await app.plan_migration()).statements == []
    assert (await app.migrate()) == migrate.Migrated(tables=[], functions=False)


async def test_a_plan_says_what_would_change_and_changes_nothing(url: str, sql: Sql, app: Penstock) -> None:
    expected = await schema(sql)
    await make_older(sql)
    older = await schema(sql)
    plan = await app.plan_migration()
    assert (plan.tables, plan.created) == ([], ["penstock.job_counts()"])
    assert plan.replaced == ["penstock.shown_time(timestamp with time zone)", "penstock.why(uuid)"]
    assert plan.dropped == ["penstock.before()"]
    assert await schema(sql) == older
    said = await command(url, "migrate", "--dry-run")
    assert "functions, dropped: penstock.before()" in said.stdout and "tables, apply: none" in said.stdout
    assert await schema(sql) == older
    await in_psql(url, plan.script)
    assert await schema(sql) == expected
    assert "nothing to do" in (await command(url, "migrate", "--dry-run")).stdout


async def test_a_plan_that_would_be_refused_says_why(url: str, sql: Sql, app: Penstock) -> None:
    await make_older(sql)
    await sql.execute("create view public.mine as select penstock.before()")
    older = await schema(sql)
    refused = await command(url, "migrate", "--dry-run")
    assert refused.returncode == 1 and "view public.mine depends on function penstock.before()" in refused.stderr
    assert await schema(sql) == older
    wrong = await command(url, "migrate", "--sql", "--json")
    assert wrong.returncode == 2 and "leave out --dry-run and --json" in wrong.stderr


@pytest.fixture
async def two_roles(sql: Sql, url: str) -> AsyncIterator[tuple[str, str]]:
    """URLs of an owner of the schema and of a role for the applications; the database has no schema yet."""
    owner, runtime = (f"test_{kind}_{uuid4().hex[:8]}" for kind in ("owner", "runtime"))
    await sql.execute("drop schema penstock cascade")
    await sql.execute(f"create role {owner} login; create role {runtime} login")
    database = await sql.fetchval("select current_database()")
    await sql.execute(f'grant create on database "{database}" to {owner}')
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    yield tuple(parts._replace(netloc=f"{role}@{host}").geturl() for role in (owner, runtime))  # type: ignore[misc]
    await sql.execute(f"drop owned by {owner} cascade; drop owned by {runtime}; drop role {owner}, {runtime}")


async def test_the_owner_migrates_and_another_role_works(two_roles: tuple[str, str], sql: Sql) -> None:
    owner, runtime = two_roles
    role = urlsplit(runtime).username or ""
    assert (await command(owner, "migrate", "--dry-run")).returncode == 0
    assert (await command(owner, "migrate")).returncode == 0
    granted = await command(owner, "grant", role, "worker")
    assert granted.returncode == 0, granted.stderr
    assert await sql.fetchval("select rolsuper from pg_roles where rolname = $1", urlsplit(owner).username) is False

    app = Penstock(runtime)

    @app.job
    async def double(job: Job[int]) -> int:
        return 2 * job.data

    async with app, running_worker(app):
        receipt = await double.enqueue(4)
        record = await app.wait(receipt.id)
        assert record.status == Status.SUCCEEDED
    # The role of the applications changes nothing of the schema.
    before = await schema(sql)
    await sql.execute("update penstock.migrations set checksum = '' where name = 'functions'")
    for call in (Penstock(runtime).migrate, Penstock(runtime).plan_migration):
        with pytest.raises((PenstockError, asyncpg.InsufficientPrivilegeError), match="permission denied|must be owner"):
            await call()
    assert (await command(owner, "migrate")).returncode == 0
    assert await schema(sql) == before
