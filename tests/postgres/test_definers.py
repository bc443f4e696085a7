"""No function that runs with the owner's rights runs code of its caller, or reads what its caller made (P17)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from penstock import Penstock
from penstock.testing import TemporaryDatabases

Sql = Any

# The functions that build statements, and why nothing of the caller's can get into the text.
BUILDS_STATEMENTS = {
    "append_chunks": "the number of a segment, from stream_partitions",
    "append_staged": "the number of a segment, from stream_partitions",
    "copy_compacted": "names that compact_stream gives it, from segments and a sequence",
    "count_events": "a name that compact_stream gives it, from segments",
    "count_superseded": "names that compact_stream gives it, from segments and a sequence",
    "note_superseded": "names that compact_stream gives it, from segments and a sequence",
    "note_latest": "names that compact_stream gives it, from segments and a sequence",
    "compact_stream": "names of segments, from segments and a sequence",
    "drop_retired": "names of segments, from retired_segments",
    "copy_without": "names that erase_segment gives it, from segments and a sequence",
    "erase_segment": "names of segments, from segments and a sequence",
    "erased_places": "a name that erase_events, erase_segment and preview_erasure give it, from segments",
    "preview_erasure": "names of segments, from segments",
    "end_load": "the number of a segment, from stream_partitions",
    "drop_undeclared": "names from the catalogue; not a definer function, so the caller's rights decide",
    "grant_access": "quoted role names; not a definer function, so the caller's rights decide",
    "guard_staged_events": "no parameter",
    "guard_staged_jobs": "no parameter",
    "lake_without": "names of partitions that prune takes from the catalogue",
    "make_archive_partition": "classes from retention_classes, and a date, as to_char writes it",
    "offsets_at": "names of segments, from segments",
    "search_finished": "conditions that stand in the function; their values are parameters",
    "search_waiting": "conditions that stand in the function; their values are parameters",
    "open_segment": "the number of a segment, from a sequence",
    "prune": "names of partitions from the catalogue, and classes in them",
    "read_chunks": "names of segments, from segments",
    "refresh_access": "no parameter",
    "revoke_access": "quoted role names; not a definer function, so the caller's rights decide",
    "revoke_all": "quoted role names; not a definer function, so the caller's rights decide",
    "set_planner_profiles": "what planner_profiles lists; not a definer function, so the caller's rights decide",
    "stream_bounds": "names of segments, from segments",
}

CHANGES_SETTINGS = {
    "settle": "notes that a day of the archive has its partitions; who sets it only makes settlements of its own fail",
    "check_leader": "lowers the limit of silence of the caller's own transaction, which holds a lock that the next leader needs",
    "time_out_waits": "shortens a limit that its own set clause has set, and so restores at its end",
}


async def functions(sql: Sql) -> list[Any]:
    return await sql.fetch(
        """
        select
            p.proname as name, p.oid::regprocedure::text as signature, p.prosecdef as definer, p.proconfig as config,
            coalesce(pg_get_function_sqlbody(p.oid), p.prosrc) as body, pg_get_userbyid(p.proowner) as owner,
            pg_get_userbyid(n.nspowner) as schema_owner,
            array(select format_type(t, null) from unnest(p.proargtypes) as t) as types,
            array(
                select format_type(t.oid, null)
                from unnest(p.proargtypes) as given (type)
                join pg_type as t on t.oid = given.type
                where t.typtype <> 'b' or t.typnamespace <> 'pg_catalog'::regnamespace
                    or t.typname like 'reg%' or t.typname = 'refcursor'
            ) as supplied,
            p.proacl is null or exists (select from aclexplode(p.proacl) where grantee = 0) as is_public
        from pg_proc as p
        join pg_namespace as n on n.oid = p.pronamespace
        where n.nspname = 'penstock'
        order by 2
        """
    )


# -- by the catalogue


async def test_every_definer_function_is_closed(app: Penstock, sql: Sql) -> None:
    wrong = []
    for function in await functions(sql):
        if not function["definer"]:
            continue
        if "search_path=penstock, pg_temp" not in (function["config"] or []):
            wrong.append(f"{function['signature']}: its search_path is not fixed: {function['config']}")
        if function["owner"] != function["schema_owner"]:
            wrong.append(f"{function['signature']}: belongs to {function['owner']}")
        if function["is_public"]:
            wrong.append(f"{function['signature']}: everybody may call it")
        if function["supplied"]:
            wrong.append(f"{function['signature']}: takes values of types that a caller can shape: {function['supplied']}")
    assert not wrong, "\n".join(wrong)


async def test_no_function_uses_what_a_caller_can_make_or_set(app: Penstock, sql: Sql) -> None:
    """All functions, since a definer function calls the others."""
    found = await functions(sql)
    assert len(found) > 200
    wrong = []
    for function in found:
        body = function["body"]
        if "pg_temp" in body or re.search(r"\btemp(orary)?\b", body):
            wrong.append(f"{function['signature']}: uses temporary objects, which a caller can make first")
        if "\\" in body:
            wrong.append(f"{function['signature']}: has a backslash, whose meaning standard_conforming_strings changes")
        if re.search(r"\bset_config\b|\bset (local|session)\b", body) and function["name"] not in CHANGES_SETTINGS:
            wrong.append(f"{function['signature']}: changes a setting of its caller")
        if re.search(r"\bpublic\.", body):
            wrong.append(f"{function['signature']}: uses the schema public")
        if re.search(r"\bexecute\s+(format|'|[a-z_]+\b(?! on))", body) and function["name"] not in BUILDS_STATEMENTS:
            wrong.append(
                f"{function['signature']}: builds statements; see that nothing of the caller's gets in, and say why here"
            )
    assert not wrong, "\n".join(wrong)


async def test_only_the_owner_shapes_what_the_functions_use(app: Penstock, sql: Sql) -> None:
    for access in ("reader", "producer", "worker", "server", "admin"):
        await sql.execute(f"do $$ begin create role test_{access}; exception when duplicate_object then null; end $$")
        await sql.execute("select penstock.grant_access($1::name, $2)", f"test_{access}", access)
    assert not await sql.fetch(
        """
        select grantee::regrole, privilege_type
        from pg_namespace, aclexplode(nspacl)
        where nspname = 'penstock' and grantee <> nspowner and privilege_type <> 'USAGE'
        """
    ), "a role may create objects in the schema"
    assert not await sql.fetch(
        """
        select relname, grantee::regrole, privilege_type
        from pg_class, aclexplode(relacl)
        where relnamespace = 'penstock'::regnamespace
            and grantee <> relowner
            and privilege_type <> 'SELECT'
            and not (relname in ('staged_jobs', 'staged_events') and privilege_type = 'INSERT')
        """
    ), "a role may change a table or attach triggers to it"
    assert not await sql.fetch(
        """
        select tgname
        from pg_trigger
        join pg_class on pg_class.oid = tgrelid
        join pg_proc on pg_proc.oid = tgfoid
        where relnamespace = 'penstock'::regnamespace
            and pronamespace not in ('penstock'::regnamespace, 'pg_catalog'::regnamespace)
        """
    )
    assert not await sql.fetch(
        """
        select attrelid::regclass, attname
        from pg_attribute
        join pg_class on pg_class.oid = attrelid
        join pg_type on pg_type.oid = atttypid
        where relnamespace = 'penstock'::regnamespace and relkind in ('r', 'p') and attnum > 0 and not attisdropped
            and typnamespace not in ('penstock'::regnamespace, 'pg_catalog'::regnamespace)
        """
    )


# -- by attack


@pytest.fixture
async def role(url: str, app: Penstock, databases: TemporaryDatabases) -> AsyncIterator[Any]:
    """Makes a connection of a role with an access, which notes in `ran_as` the users under which its code ran."""
    opened = []

    async def connect(access: str) -> tuple[Sql, list[str]]:
        connection = await asyncpg.connect(url)
        opened.append(connection)
        name = f"test_{access}"
        await connection.execute(f"do $$ begin create role {name}; exception when duplicate_object then null; end $$")
        await connection.execute("select penstock.grant_access($1::name, $2)", name, access)
        # As in databases that were made before PostgreSQL 15.
        await connection.execute(f"grant create on schema public to {name}")
        await connection.execute(f"set session authorization {name}")
        ran_as: list[str] = []
        connection.add_log_listener(lambda _, message: ran_as.append(str(message.message)))
        await connection.execute(
            """
            create function pg_temp.attack() returns boolean language plpgsql as
            $$ begin raise notice '%', current_user; return true; end $$;
            create function pg_temp.attack_row() returns trigger language plpgsql as
            $$ begin raise notice '%', current_user; return new; end $$;
            """
        )
        return connection, ran_as

    yield connect
    for connection in opened:
        connection.terminate()


async def test_a_load_reads_no_view_of_its_caller(role: Any, sql: Sql) -> None:
    await sql.execute("select penstock.create_stream('events', 2)")
    producer, ran_as = await role("producer")
    await producer.execute(
        """
        create temporary view penstock_load as
        select 1::bigint as place, 0 as partition, 1 as events, null::text[] as keys, null::timestamptz[] as times,
            null::json[] as headers, array['1'::json] as data, null::bytea[] as bytes
        where pg_temp.attack()
        """
    )
    with contextlib.suppress(asyncpg.PostgresError):
        await producer.fetch("select * from penstock.end_load('events', 2)")
    assert ran_as == [], f"code of a producer ran as {ran_as}"


async def test_a_load_stores_nothing_in_a_table_of_its_caller(role: Any, sql: Sql) -> None:
    """A trigger, a default, a generated column and a check of the caller's, each on a table of the load's name."""
    await sql.execute("select penstock.create_stream('events', 2)")
    producer, ran_as = await role("producer")
    await producer.execute(
        """
        create function pg_temp.attack_of(integer) returns boolean language sql immutable as 'select pg_temp.attack()';
        create temporary table penstock_load (
            place bigint generated always as identity, partition integer, events integer, keys text[], times timestamptz[],
            headers json[], data json[], bytes bytea[], seen boolean default pg_temp.attack(),
            made boolean generated always as (pg_temp.attack_of(partition)) stored,
            check (pg_temp.attack_of(events))
        );
        create trigger attack after delete or update or truncate on penstock_load
        for each statement execute function pg_temp.attack_row();
        insert into penstock_load (partition, events, data) values (0, 1, array['1'::json]);
        """
    )
    ran_as.clear()
    for call in ("select penstock.begin_load('events')", "select * from penstock.end_load('events', 2)"):
        with contextlib.suppress(asyncpg.PostgresError):
            await producer.fetch(call)
    assert ran_as == [], f"code of a producer ran as {ran_as}"


async def test_a_compaction_writes_into_no_table_of_its_caller(role: Any, sql: Sql) -> None:
    await sql.execute("select penstock.create_stream('events', 1, '{\"compact\": true}')")
    await sql.execute("select penstock.append('events', '1', 'k')")
    await sql.execute("select penstock.append('events', '2', 'k')")
    await sql.execute("select penstock.roll_segment('events')")
    worker, ran_as = await role("worker")
    await worker.execute(
        """
        create temporary table penstock_latest (key text primary key, partition integer, event_offset bigint);
        create trigger attack before insert or update on penstock_latest for each row execute function pg_temp.attack_row();
        create trigger attack_all before truncate on penstock_latest for each statement execute function pg_temp.attack_row();
        """
    )
    compacted = None
    with contextlib.suppress(asyncpg.PostgresError):
        compacted = await worker.fetchval("select penstock.compact_stream('events')")
    assert ran_as == [], f"code of a worker ran as {ran_as}"
    assert compacted == 1
    assert [row["data"] for row in await worker.fetch("select data from penstock.read_events('events', 0)")] == ["2"]
    assert not await sql.fetch(
        "select relname from pg_class where relname like 'latest%' and relnamespace = 'penstock'::regnamespace"
    )


async def test_a_load_takes_only_what_its_own_transaction_copied(role: Any, sql: Sql) -> None:
    await sql.execute("select penstock.create_stream('events', 1)")
    columns = ["stream", "partition", "events", "data"]
    one, _ = await role("producer")
    # Left behind by a transaction that forgot end_load.
    await one.copy_records_to_table("loaded_chunks", schema_name="penstock", records=[("events", 0, 1, ["1"])], columns=columns)
    async with one.transaction():
        await one.execute("select penstock.begin_load('events')")
        await one.copy_records_to_table(
            "loaded_chunks", schema_name="penstock", records=[("events", 0, 1, ["2"])], columns=columns
        )
        assert await one.fetchval("select events from penstock.end_load('events', 1)") == 1
    assert [row["data"] for row in await sql.fetch("select data from penstock.read_events('events', 0)")] == ["2"]
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await one.execute("insert into penstock.loaded_chunks (xid, stream, partition, events) values ('1', 'events', 0, 1)")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await one.execute("select from penstock.loaded_chunks")
    await sql.execute("update penstock.loaded_chunks set loaded_at = loaded_at - interval '2 days'")
    assert await sql.fetchval("select penstock.prune_staged()") == 1


# What a session of a worker does, a call or more of each room.
CALLS = [
    "select penstock.declare_job_type('mail', '{}')",
    "select penstock.enqueue('mail', '{\"n\": 1}', p_key => 'k', p_unique_key => 'u')",
    "select penstock.enqueue_many('mail', array['1'::pg_catalog.jsonb, '2'])",
    "select penstock.enqueue_json('mail', '[{\"data\": 1}]')",
    "select penstock.put_jobs('mail', array['1'::pg_catalog.jsonb],"
    " array['0190163d-8694-739b-aea5-966c26f8ad91'::pg_catalog.uuid])",
    "select penstock.register_worker('w', '{mail}', 'host', 1, 10, '10 s', '{}')",
    "select penstock.heartbeat('w', 1, 'running')",
    "select penstock.wait_for_jobs('w', '{mail}')",
    "select penstock.settle(array_agg(id), array_agg(attempt), array_agg(lease)) from penstock.claim('w', '{mail}', 2)",
    "select penstock.settle(array_agg(id), array_agg(attempt), array_agg(lease), array_agg('failed'::pg_catalog.text))"
    " from penstock.claim('w', '{mail}', 2)",
    "select penstock.cancel('0190163d-8694-739b-aea5-966c26f8ad91')",
    "select penstock.promote(10)",
    "select penstock.recover(10)",
    "select penstock.expire(10)",
    "select penstock.list_jobs()",
    "select penstock.find_jobs(array(select penstock.list_jobs()))",
    "select penstock.job_counts()",
    "select penstock.top('types'), penstock.top('keys')",
    "select penstock.job_rates()",
    "select penstock.load_of_types()",
    "select penstock.declare_pool('pool', '{}', '{}')",
    "select penstock.enqueue('pool', '1', p_key => 'k')",
    "select penstock.start_standing('pool', 'k', '1')",
    "select penstock.key_state('pool', 'k')",
    "select penstock.pool_jobs('pool')",
    "select penstock.paused_keys_of('pool')",
    "select penstock.join_group('pool', 'm', penstock.new_id(), '10 s', '{}')",
    "select penstock.declare_topic('topic', '{}')",
    "select penstock.subscribe('topic', 'c')",
    "select penstock.publish('topic', '1')",
    "select penstock.read_topic('topic')",
    "select penstock.maintain_topics()",
    "select penstock.declare_stream('events', 2, '{}')",
    "select penstock.append('events', '1', 'k', '{\"h\": \"v\"}', now())",
    'select penstock.append_json(\'events\', \'[{"key": "k", "data": 1}]\')',
    "select penstock.begin_load('events')",
    "insert into penstock.loaded_chunks (stream, partition, events, data) values ('events', 0, 1, array['1'::json])",
    "select penstock.end_load('events', 2)",
    "select penstock.read_chunks('events', '{0, 1}', '{0, 0}', 10)",
    "select penstock.stream_bounds('events')",
    "select penstock.offsets_at('events', now())",
    "select penstock.declare_consumer_group('events', 'g')",
    "select penstock.group_lag('events', 'g')",
    "select penstock.maintain_stream('events')",
    "select penstock.compact_stream('events')",
    "select penstock.streams_to_maintain()",
    "select penstock.drop_retired()",
    'select penstock.scan(\'archived_jobs\', \'{id, data}\', \'[{"column": "name", "op": "=", "value": "mail"}]\')',
    "select penstock.scan_events('events', null, '{0}', '{0}', '{10}', '{value}')",
    "select penstock.wait_for_events('events', 'penstock_c')",
    "select penstock.wait_for_history('r', true)",
    "select penstock.fleet_counts()",
    "select penstock.worker_list()",
    "select penstock.declare_schedule('mail', 'every', '60', now() - interval '1 second', 'job')",
    "select penstock.look_at_schedule('mail')",
    "select penstock.enqueue_run('mail', '60', next_at, next_at, next_at + interval '1 minute') from penstock.schedules",
    "select penstock.note_schedules('{mail}')",
    "select penstock.schedule_list()",
    'select penstock.note_handlers(\'[{"kind": "job", "name": "mail"}]\')',
    "select penstock.handler_list()",
    "select penstock.declare_leader_task('cleanup')",
    "select penstock.leader_list()",
    "select penstock.schedule_runs('mail')",
    "select penstock.declare_schedule('beat', 'every', '60', now() - interval '1 second')",
    "select penstock.take_schedule('beat', '60', 'w', '10 seconds')",
    "select penstock.end_schedule('beat', 'w', next_at, next_at + '1 m', next_at, now(), '{\"type\": \"E\"}')"
    " from penstock.schedules",
    "select penstock.run_schedule('beat')",
    "select penstock.declare_schedule('each', 'every', '60', null, 'per-worker')",
    "select penstock.note_run('each', 'w', now(), now(), now(), '{}')",
]


async def test_a_session_full_of_traps_runs_nothing_as_the_owner(role: Any, sql: Sql) -> None:
    """Views, functions, operators, types and casts of the caller's, under every name that the functions use."""
    worker, ran_as = await role("worker")
    relations = [row["relname"] for row in await sql.fetch(
        "select relname from pg_class where relnamespace = 'penstock'::regnamespace and relkind in ('r', 'p', 'S')"
    )]  # fmt: skip
    for relation in relations:
        await worker.execute(f"create temporary view {relation} as select * from penstock.{relation} where pg_temp.attack()")
    for schema in ("pg_temp", "public"):
        for function in await functions(sql):
            if function["name"] in {"check_chunk", "notify_readers", "grant_access"} or "penstock." in str(function["types"]):
                continue
            arguments = ", ".join(function["types"])
            await worker.execute(
                f"create or replace function {schema}.{function['name']}({arguments}) returns boolean language plpgsql as"
                " $$ begin raise notice '%', current_user; return true; end $$"
            )
        for kind in ("text", "uuid", "bigint", "integer", "jsonb", "timestamptz", "text[]", "xid8"):
            await worker.execute(
                f"""
                create or replace function {schema}.trap({kind}, {kind}) returns boolean language plpgsql as
                $$ begin raise notice '%', current_user; return true; end $$;
                create operator {schema}.= (leftarg = {kind}, rightarg = {kind}, function = {schema}.trap);
                create operator {schema}.<> (leftarg = {kind}, rightarg = {kind}, function = {schema}.trap);
                create operator {schema}.< (leftarg = {kind}, rightarg = {kind}, function = {schema}.trap);
                """
            )
        for kind in ("jobs", "streams", "job_status", "archived_job_status"):
            if kind not in relations or schema == "public":
                await worker.execute(f"create domain {schema}.{kind} as text check (pg_temp.attack())")
        for kind in ("text", "uuid", "interval", "jsonb", "bigint"):
            await worker.execute(f"create domain {schema}.{kind} as pg_catalog.text check (pg_temp.attack())")
    await worker.execute("set search_path = pg_temp, public, pg_catalog, penstock")
    await worker.execute("set standard_conforming_strings = off; set escape_string_warning = off")
    ran_as.clear()
    for call in CALLS:
        async with worker.transaction():
            await worker.execute(call)
    # What the session does for itself may run its own code, as itself.
    assert set(ran_as) <= {"test_worker"}, f"code of a worker ran as {set(ran_as)}"


async def test_a_caller_cannot_move_the_clock(role: Any, sql: Sql) -> None:
    worker, _ = await role("worker")
    await worker.execute("set penstock.clock = '2001-01-01T00:00:00Z'")
    assert await worker.fetchval("select penstock.clock() > now() - interval '1 minute'")
    await worker.execute("select penstock.declare_job_type('mail', '{}')")
    await worker.execute("select penstock.enqueue('mail', '1')")
    assert await sql.fetchval("select bool_and(created_at > now() - interval '1 minute') from penstock.queued_jobs")
    await worker.execute("set penstock.clock = 'no time'")
    await worker.execute("select penstock.enqueue('mail', '1')")


async def test_no_function_leaves_a_changed_setting_behind(app: Penstock, sql: Sql) -> None:
    managing = [
        "select penstock.resize_pool('pool', 512)",
        "select penstock.pause_key('pool', 'k')",
        "select penstock.paused_keys_held('pool', 'm')",
        "select penstock.resume_key('pool', 'k')",
        "select penstock.roll_segment('events')",
        "select penstock.grow_stream('events', 4)",
        "select penstock.retire_segments('events')",
        "select penstock.change_stream('events', '{\"segment_events\": 1}')",
        "select penstock.append('events', '1')",
        "select penstock.maintain_stream('events')",
        "select penstock.drop_stream('events', true)",
        "select penstock.drop_retired()",
        "select penstock.prune('1 day')",
    ]
    await sql.execute("set lock_timeout = '5s'")
    settings = "select name, setting from pg_settings where name not like '%transaction%' order by name"
    changed = []
    for call in CALLS + managing:
        async with sql.transaction():
            await sql.execute("set local lock_timeout = '7s'")
            before = dict(await sql.fetch(settings))
            await sql.execute(call)
            after = dict(await sql.fetch(settings))
            changed += [(call, name, value, after[name]) for name, value in before.items() if after[name] != value]
        assert await sql.fetchval("show lock_timeout") == "5s", call
    assert not changed


async def test_a_call_that_gives_up_leaves_the_settings_as_they_were(app: Penstock, sql: Sql, url: str) -> None:
    await sql.execute("select penstock.create_stream('events', 2); select penstock.declare_pool('pool', '{}', '{}')")
    other = await asyncpg.connect(url)
    try:
        async with other.transaction():
            await other.execute("select pg_advisory_xact_lock(hashtext('penstock.slots'), hashtext('pool'))")
            async with sql.transaction():
                await sql.execute("set local lock_timeout = '7s'")
                with pytest.raises(asyncpg.LockNotAvailableError):
                    async with sql.transaction():
                        await sql.execute("select penstock.resize_pool('pool', 512)")
                assert await sql.fetchval("show lock_timeout") == "7s"
    finally:
        await other.close()
