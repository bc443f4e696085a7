"""A role can do what it was granted, and no more (P17)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from penstock import Penstock
from tests.postgres import sql_roles

Sql = Any


@pytest.fixture
async def roles(app: Penstock, sql: Sql) -> None:
    await sql_roles.prepare(sql)


@pytest.fixture
async def new_role(sql: Sql) -> AsyncIterator[str]:
    name = f"test_{uuid4().hex[:8]}"
    await sql.execute(f"create role {name}")
    yield name
    await sql.execute("reset session authorization")
    await sql.execute(f"drop owned by {name}; drop role {name}")


async def rights(sql: Sql, role: str) -> dict[str, Any]:
    """All that a role may do in the schema."""
    return dict(
        await sql.fetchrow(
            """
            select
                has_schema_privilege($1, 'penstock', 'usage') as schema,
                array(
                    select proname::text from pg_proc
                    where pronamespace = 'penstock'::regnamespace and has_function_privilege($1, oid, 'execute') order by 1
                ) as functions,
                array(
                    select relname::text from pg_class
                    where relnamespace = 'penstock'::regnamespace and relkind in ('r', 'p') and (
                        has_table_privilege($1, oid, 'select, delete, truncate, trigger')
                        or has_any_column_privilege($1, oid, 'insert, update')
                    )
                    order by 1
                ) as tables,
                array(
                    select relname::text from pg_class
                    where relnamespace = 'penstock'::regnamespace and relkind in ('r', 'p')
                        and has_any_column_privilege($1, oid, 'insert')
                    order by 1
                ) as inserts,
                array(
                    select defaclobjtype::text from pg_default_acl, aclexplode(defaclacl) where grantee = $1::regrole
                ) as defaults
            """,
            role,
        )
    )


async def test_the_page_of_roles_and_functions_is_up_to_date(roles: None, sql: Sql) -> None:
    assert sql_roles.PAGE.read_text("utf-8") == await sql_roles.page(sql), "run: make sqlroles"


async def test_every_function_answers_or_refuses_as_the_page_says(roles: None, sql: Sql, new_role: str) -> None:
    """Each function called with nulls: a role that may not gets 42501, and who may gets something else."""
    await sql.execute("set search_path = pg_catalog")
    functions = await sql.fetch(
        """
        select proname as name, array(select format_type(type, null) from unnest(proargtypes) as type) as types
        from pg_proc
        where pronamespace = 'penstock'::regnamespace and prorettype <> 'trigger'::regtype
            -- A strict function is not called at all when an argument is null.
            and not proisstrict
        """
    )
    lines = {line.split("`")[1]: line for line in sql_roles.PAGE.read_text("utf-8").splitlines() if line.startswith("| `")}
    checked = {True: 0, False: 0}
    for access in (*sql_roles.ACCESSES, None):
        role = new_role if access is None else f"test_{access}"
        await sql.execute(f"set session authorization {role}")
        await sql.execute("set statement_timeout = '20s'")
        for function in functions:
            name = f"{function['name']}({', '.join(function['types'])})"
            allowed = access is not None and lines[name].split("|")[2 + sql_roles.ACCESSES.index(access)].strip() == "x"
            arguments = ", ".join(f"null::{kind}" for kind in function["types"])
            refused, why = False, "done"
            transaction = sql.transaction()
            await transaction.start()
            try:
                await sql.execute(f"select penstock.{function['name']}({arguments})")
            except asyncpg.PostgresError as error:
                refused = error.sqlstate == "42501"
                why = str(error)
            finally:
                await transaction.rollback()
            assert refused is not allowed, f"{access}: {name}: {'refused' if refused else 'allowed'}: {why}"
            checked[allowed] += 1
        await sql.execute("reset session authorization")
    assert checked[True] > 300 and checked[False] > 300, checked


async def test_less_access_takes_away_what_it_does_not_hold(app: Penstock, sql: Sql, new_role: str) -> None:
    expected = {}
    for access in ("reader", "producer", "worker", "server", "admin"):
        await sql.execute("select penstock.grant_access($1::name, $2)", new_role, access)
        expected[access] = await rights(sql, new_role)
    for access in ("server", "worker", "producer", "reader"):
        await sql.execute("select penstock.grant_access($1::name, $2)", new_role, access)
        assert await rights(sql, new_role) == expected[access], access
        assert await sql.fetchval("select access from penstock.access_grants where role_name = $1", new_role) == access
    assert len(expected["reader"]["functions"]) < len(expected["producer"]["functions"]) < len(expected["worker"]["functions"])
    assert expected["reader"]["inserts"] == []
    assert expected["producer"]["inserts"] == ["loaded_chunks", "staged_events", "staged_jobs"]
    await sql.execute(f"set session authorization {new_role}")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await sql.execute("select penstock.pause('x')")
    await sql.execute("reset session authorization")
    await sql.execute("select penstock.refresh_access()")
    assert await rights(sql, new_role) == expected["reader"]


async def test_revoked_access_leaves_nothing(app: Penstock, sql: Sql, new_role: str) -> None:
    before = await rights(sql, new_role)
    await sql.execute("select penstock.grant_access($1::name, 'admin')", new_role)
    await sql.execute("select penstock.revoke_access($1::name)", new_role)
    await sql.execute("select penstock.create_stream('events', 1)")
    assert await rights(sql, new_role) == before
    assert before["functions"] == before["tables"] == before["defaults"] == []
    await sql.execute("select penstock.refresh_access()")
    assert await rights(sql, new_role) == before
    with pytest.raises(asyncpg.PostgresError, match="no such role"):
        await sql.execute("select penstock.revoke_access('nobody_there')")


async def test_a_new_role_of_an_old_name_gets_nothing_from_a_migration(app: Penstock, sql: Sql, new_role: str) -> None:
    await sql.execute("select penstock.grant_access($1::name, 'admin')", new_role)
    await sql.execute(f"drop owned by {new_role}; drop role {new_role}; create role {new_role}")
    await sql.execute("select penstock.refresh_access()")
    assert (await rights(sql, new_role))["functions"] == []
    assert not await sql.fetch("select from penstock.access_grants where role_name = $1", new_role)


async def test_new_tables_can_be_read_by_whichever_role_they_are_made_and_granted(app: Penstock, sql: Sql, new_role: str) -> None:
    await sql.execute("select penstock.grant_access($1::name, 'reader')", new_role)
    await sql.execute("select penstock.create_stream('events', 1)")
    assert "events_1" in (await rights(sql, new_role))["tables"]


# -- what a role notes and stages is its own


async def test_a_reader_waits_in_a_bounded_number_of_places(roles: None, sql: Sql) -> None:
    await sql.execute("select penstock.create_stream('events', 1)")
    await sql.execute("select penstock.wait_for_events('events', 'penstock_mine'), penstock.wait_for_history('mine', true)")
    await sql.execute("set session authorization test_reader")
    await sql.execute("select penstock.wait_for_events('events', 'penstock_' || n) from generate_series(1, 1000) as n")
    await sql.execute(
        "select penstock.wait_for_events_of(array['events'], 'penstock_of_' || n) from generate_series(1, 1000) as n"
    )
    await sql.execute("select penstock.wait_for_history('reader ' || n, true) from generate_series(1, 1000) as n")
    with pytest.raises(asyncpg.PostgresError, match="invalid reader"):
        await sql.execute("select penstock.wait_for_history(repeat('x', 201), true)")
    # Not another's.
    await sql.execute("select penstock.stop_waiting('penstock_mine'), penstock.wait_for_history('mine', false)")
    await sql.execute("reset session authorization")
    assert await sql.fetchval("select count(*) from penstock.listeners where kind = 'events'") == 101
    assert await sql.fetchval("select count(*) from penstock.listeners where kind = 'history'") == 101
    assert await sql.fetchval("select count(*) from penstock.listeners where channel = 'penstock_mine'") == 1
    assert await sql.fetchval("select count(*) from penstock.listeners where subject = 'mine'") == 1
    # A place that was not renewed is free again, and who waits already keeps its place.
    await sql.execute("update penstock.listeners set until = until - interval '31 seconds' where channel = 'penstock_7'")
    await sql.execute("set session authorization test_reader")
    await sql.execute(
        "select penstock.wait_for_events('events', 'penstock_1'), penstock.wait_for_events('events', 'penstock_new')"
    )
    await sql.execute("reset session authorization")
    channels = {row["channel"] for row in await sql.fetch("select channel from penstock.listeners where kind = 'events'")}
    assert {"penstock_1", "penstock_new", "penstock_mine"} <= channels and "penstock_7" not in channels and len(channels) == 101


async def test_what_one_role_staged_no_other_commits_or_drops(roles: None, sql: Sql, new_role: str) -> None:
    await sql.execute("select penstock.create_job_type('mail')")
    await sql.execute("select penstock.create_stream('events', 1)")
    await sql.execute("select penstock.grant_access($1::name, 'producer')", new_role)
    part = await sql.fetchval("select penstock.parts_of(1, 'job mail') || 'x'")
    of_events = await sql.fetchval("select penstock.parts_of(1, 'stream events') || 'x'")

    async def stage() -> None:
        await sql.execute(
            "insert into penstock.staged_jobs (writer, part, place, name, data) values ('nightly', $1, 1, 'mail', '{}')", part
        )
        await sql.execute(
            "insert into penstock.staged_events (writer, part, place, stream, width, partition, events, data)"
            " values ('nightly', $1, 1, 'events', 1, 0, 1, array['1'])",
            of_events,
        )

    await sql.execute("set session authorization test_producer")
    await stage()
    for column in ("role", "staged_at"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await sql.execute(
                f"insert into penstock.staged_jobs (writer, part, place, name, data, {column})"
                " values ('w', 'p', 1, 'mail', '{}', null)"
            )
    await sql.execute(f"set session authorization {new_role}")
    await stage()
    await sql.execute(
        "select penstock.discard_staged('nightly', 1, 'job mail'), penstock.discard_staged('nightly', 1, 'stream events')"
    )
    await sql.execute("select penstock.commit_staged('nightly', 1000, '{}', 0, 'job mail')")
    await sql.execute("select penstock.commit_staged_events('nightly', 1000, '{}', 0, 'stream events')")
    with pytest.raises(asyncpg.PostgresError, match="0 of 1 staged jobs"):
        await sql.execute("select penstock.commit_staged('thief', 1, array[$1], 1, 'job mail')", part)
    await stage()
    await sql.execute("set session authorization test_producer")
    (done,) = await sql.fetch("select * from penstock.commit_staged('nightly', 1, array[$1], 1, 'job mail')", part)
    assert (done["queued"], done["known"]) == (1, 0)
    assert await sql.fetchval("select penstock.commit_staged_events('nightly', 1, array[$1], 1, 'stream events')", of_events)
    await sql.execute("reset session authorization")
    assert await sql.fetchval("select count(*) from penstock.staged_jobs where role = $1::name", new_role) == 1
    assert await sql.fetchval("select sum(next_offset) from penstock.stream_bounds('events')") == 1


async def test_no_writer_commits_without_a_number(roles: None, sql: Sql) -> None:
    for call in ("commit_staged", "commit_staged_events"):
        with pytest.raises(asyncpg.PostgresError, match="writer 'nightly' has no epoch") as refused:
            await sql.execute(f"select penstock.{call}('nightly', null, '{{}}', 0, 'job mail')")
        assert refused.value.sqlstate == "PS400"


# -- the lease


async def test_jobs_are_settled_and_extended_only_with_their_lease(roles: None, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('mail')")
    await sql.execute("select penstock.enqueue_many('mail', array_fill('{}'::jsonb, array[2]))")
    jobs = await sql.fetch("select id, attempt, lease from penstock.claim('w', '{mail}', 2)")
    ids, attempts, leases = ([job[i] for job in jobs] for i in range(3))
    await sql.execute("set session authorization test_worker")
    for given in (None, [leases[0], None]):
        for call in ("settle", "extend"):
            with pytest.raises(asyncpg.PostgresError, match="without its lease") as refused:
                await sql.fetch(f"select * from penstock.{call}($1, $2::smallint[], $3::bigint[])", ids, attempts, given)
            assert refused.value.sqlstate == "PS400"
    wrong = await sql.fetch(
        "select * from penstock.settle($1, $2::smallint[], $3::bigint[])", ids, attempts, [lease + 1 for lease in leases]
    )
    assert [row["outcome"] for row in wrong] == ["stale", "stale"]
    # The function of the callbacks has a grant of its own.
    by_callback = "select outcome from penstock.settle_attempts('{mail}', $1, $2::smallint[], '{succeeded}')"
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await sql.fetch(by_callback, ids[:1], [5])
    await sql.execute("set session authorization test_server")
    assert await sql.fetchval(by_callback, ids[:1], [5]) == "succeeded"
    await sql.execute("set session authorization test_worker")
    assert (
        await sql.fetch("select * from penstock.settle($1, $2::smallint[], $3::bigint[])", ids[1:], attempts[1:], leases[1:])
        == []
    )


# -- tenants


async def test_the_recipe_for_tenants_limits_a_role_to_its_types(app: Penstock, sql: Sql, url: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "sql.md").read_text("utf-8")
    (recipe,) = re.findall(r"## Tenants\n.*?```sql\n(.*?)```", text, re.DOTALL)
    await sql.execute("select penstock.create_job_type('acme-mail'), penstock.create_job_type('other-mail')")
    enqueue = "select penstock.enqueue('other-mail', '{\"secret\": \"theirs\"}')"
    await sql.execute(enqueue)
    await sql.execute(
        "select penstock.settle(array_agg(id), array_agg(attempt), array_agg(lease)) from penstock.claim('w', '{other-mail}', 1)"
    )
    other = await sql.fetchval(enqueue)
    await sql.execute("do $$ begin drop role acme; exception when undefined_object then null; end $$")
    await sql.execute(recipe)
    tenant = await asyncpg.connect(url)
    heard: list[str] = []
    tenant.add_log_listener(lambda _, message: heard.append(str(message.message)))
    try:
        await tenant.execute("set session authorization acme")
        mine = await tenant.fetchval("select acme.enqueue('acme-mail', '{\"n\": 1}')")
        assert [row["id"] for row in await tenant.fetch("select id from acme.queued_jobs")] == [mine]
        # What looks at rows before the view has chosen them, would see the others'.
        await tenant.execute(
            "create function pg_temp.leak(text) returns boolean language plpgsql cost 0.0001 as"
            " $$ begin raise notice '%', $1; return true; end $$"
        )
        for view in ("queued_jobs", "archived_jobs"):
            await tenant.fetch(f"select id from acme.{view} where pg_temp.leak(data::text)")
        assert heard and not [message for message in heard if "theirs" in message]
        for call in (
            "select acme.enqueue('other-mail', '{}')",
            f"select acme.cancel('{other}')",
            "select penstock.enqueue('acme-mail', '{}')",
            "select * from penstock.queued_jobs",
            "select * from penstock.find_jobs('{}')",
            "select * from penstock.archived_jobs",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await tenant.execute(call)
        assert await tenant.fetchval("select acme.cancel($1)", mine) == "cancelled"
    finally:
        await tenant.close()
        await sql.execute("drop schema acme cascade; drop owned by acme; drop role acme")
    assert await sql.fetchval("select status from penstock.find_jobs(array[$1::uuid])", other) == "queued"


async def test_no_login_can_keep_others_from_recovering_jobs(app: Penstock, sql: Sql, url: str) -> None:
    """Advisory locks are for everybody, also for a role without any access."""
    await sql.execute(
        """
        select penstock.create_job_type('mail', '{"visibility_timeout": "1 second"}');
        select penstock.enqueue('mail', '1');
        select penstock.claim('w', '{mail}', 1);
        update penstock.leases set expires_at = penstock.clock() - interval '1 minute';
        do $$ begin create role test_unrelated; exception when duplicate_object then null; end $$;
        """
    )
    # All advisory locks that the functions of maintenance are known to take.
    names = await sql.fetch(
        "select distinct (regexp_matches(prosrc, 'hashtext\\(''(penstock[.][a-z_]+)''\\)', 'g'))[1] as name"
        " from pg_proc where pronamespace = 'penstock'::regnamespace"
        " and proname in ('recover', 'maintain_topics', 'promote', 'expire')"
    )
    other = await asyncpg.connect(url)
    try:
        await other.execute("set role test_unrelated")
        for name in {"penstock.recover", "penstock.maintain_topics", *[row["name"] for row in names]}:
            await other.execute("select pg_advisory_lock(hashtext($1))", name)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await other.execute("select from penstock.maintenance for update")
        assert await sql.fetchval("select penstock.recover()") == 1
    finally:
        await other.close()
    reader = await asyncpg.connect(url)
    try:
        await sql.execute("select penstock.grant_access('test_unrelated', 'reader')")
        await reader.execute("set role test_unrelated")
        for strength in ("key share", "update"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await reader.execute(f"select from penstock.maintenance for {strength}")
    finally:
        await reader.close()
        await sql.execute("select penstock.revoke_access('test_unrelated')")
