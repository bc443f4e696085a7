"""Ids that Penstock derives: no role finds one out, and one that is taken all the same stops, forges and delays nothing (P17)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from penstock import Backoff, Conflict, EnqueueOutcome, Job, NewJob, NewMessage, Penstock, Retry
from penstock.testing import run_due_jobs, running_worker
from tests.postgres import sql_roles

Sql: TypeAlias = "asyncpg.Connection[Any]"
STATES = ("deferred", "running", "archived", "waiting")


@pytest.fixture
async def roles(app: Penstock, sql: Sql) -> None:
    await sql_roles.prepare(sql)


@pytest.fixture
async def tenant(app: Penstock, sql: Sql, url: str) -> AsyncIterator[Sql]:
    """A login that may enqueue jobs of the type mine, as the recipe for tenants lets it, and nothing else."""
    await sql.execute(
        """
        select penstock.create_job_type('mine'), penstock.create_job_type('theirs');
        do $$ begin create role test_tenant; exception when duplicate_object then null; end $$;
        create schema tenant;
        grant usage on schema tenant to test_tenant;
        create function tenant.enqueue(p_data jsonb, p_id uuid) returns uuid language sql security definer
            set search_path = pg_catalog, pg_temp
            as $$ select penstock.enqueue('mine', p_data, p_id) $$;
        """
    )
    connection = await asyncpg.connect(url)
    await connection.execute("set session authorization test_tenant")
    yield connection
    await connection.close()


async def take(sql: Sql, id: UUID, state: str = "deferred", name: str = "thief") -> None:
    """Enqueue a job under an id, and bring it into a state."""
    await sql.execute("select penstock.declare_job_type($1, '{\"keep_result\": true}')", name)
    if state == "waiting":
        before = await sql.fetchval("select penstock.enqueue($1, '{}', p_run_after => now() + interval '1 day')", name)
        await sql.execute("select penstock.enqueue($1, '\"secret\"', $2, p_after => array[$3::uuid])", name, id, before)
    elif state == "deferred":
        await sql.execute("select penstock.enqueue($1, '\"secret\"', $2, p_run_after => now() + interval '1 day')", name, id)
    else:
        await sql.execute("select penstock.enqueue($1, '\"secret\"', $2)", name, id)
        [job] = await sql.fetch("select * from penstock.claim('thief', array[$1], 1)", name)
        assert job["id"] == id
        if state == "archived":
            await sql.execute(
                "select penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint], '{succeeded}', '{7}')",
                id,
                job["lease"],
            )


# -- the secret


async def test_no_role_reads_the_secret_or_derives_the_ids_of_others(roles: None, sql: Sql) -> None:
    calls = (
        "select * from penstock.id_secrets",
        "select penstock.derived_ids(now(), '{run}')",
        "select penstock.run_id('report', now())",
        "select penstock.late_copy_ids('{}', '{}', '{}')",
        "select penstock.renew_id_secret()",
    )
    for access in sql_roles.ACCESSES:
        await sql.execute(f"set session authorization test_{access}")
        for call in calls:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await sql.fetch(call)
        await sql.execute("reset session authorization")


async def test_a_secret_is_the_databases_own_and_a_new_one_counts_for_what_begins_afterwards(app: Penstock, sql: Sql) -> None:
    [secret] = await sql.fetch("select inner_key, outer_key from penstock.id_secrets")
    assert len({*secret, secret["inner_key"][:16], secret["outer_key"][:16], secret["inner_key"][16:32]}) == 5
    before, after = datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1)
    derived = "select penstock.derived_ids($1, array['run a', 'run b'])"
    first, later, timeless = [await sql.fetchval(derived, at) for at in (before, after, None)]
    assert len({*first, *later, *timeless}) == 6
    assert [id.version for id in (*first, *timeless)] == [7, 7, 8, 8]
    await sql.execute("select penstock.renew_id_secret()")
    assert await sql.fetchval(derived, before) == first
    assert not {*(await sql.fetchval(derived, after)), *(await sql.fetchval(derived, None))} & {*later, *timeless}


async def test_each_role_derives_ids_of_its_own(roles: None, sql: Sql) -> None:
    found = {}
    for access in ("producer", "worker"):
        await sql.execute(f"set session authorization test_{access}")
        found[access] = await sql.fetchval("select penstock.own_ids('imports', '{a,b}')")
        assert await sql.fetchval("select penstock.own_ids('imports', '{b,a}')") == found[access][::-1]
        assert await sql.fetchval("select penstock.own_ids('exports', '{a}')") != found[access][:1]
        await sql.execute("reset session authorization")
    assert not {*found["producer"]} & {*found["worker"]}


# -- schedules


@pytest.mark.parametrize("state", STATES)
async def test_a_schedule_whose_run_id_is_taken_goes_on(app: Penstock, sql: Sql, state: str) -> None:
    warnings: list[str] = []
    sql.add_log_listener(lambda _, message: warnings.append(str(message.message)))
    await sql.execute("select penstock.create_job_type('report')")
    await sql.execute(
        "insert into penstock.schedules (name, kind, spec, runs_as, next_at, updated_at)"
        " values ('report', 'every', '60', 'job', now() - interval '1 minute', now())"
    )
    due = await sql.fetchval("select next_at from penstock.schedules")
    id = await sql.fetchval("select penstock.run_id('report', $1)", due)
    await take(sql, id, state)
    run = await sql.fetchval("select penstock.enqueue_run('report', '60', $1, $1, $2)", due, due + timedelta(minutes=1))
    assert run not in (None, id)
    assert await sql.fetchval("select name from penstock.queued_jobs where id = $1", run) == "report"
    assert await sql.fetchval("select job_id from penstock.schedules") == run
    assert [str(id) in warning for warning in warnings] == [True]


async def test_a_slot_that_has_its_run_gets_no_other_one(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('report')")
    await sql.execute(
        "insert into penstock.schedules (name, kind, spec, runs_as, next_at, updated_at)"
        " values ('report', 'every', '60', 'job', now() - interval '1 minute', now())"
    )
    due = await sql.fetchval("select next_at from penstock.schedules")
    enqueue = "select penstock.enqueue_run('report', '60', $1, $1, $2)"
    run = await sql.fetchval(enqueue, due, due + timedelta(minutes=1))
    [job] = await sql.fetch("select * from penstock.claim('w', '{report}', 1)")
    await sql.execute("select penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint])", run, job["lease"])
    # Declared again, with times that begin before.
    await sql.execute("update penstock.schedules set next_at = $1", due)
    assert await sql.fetchval(enqueue, due, due + timedelta(minutes=1)) == run
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0


# -- children


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", ["thief", "resize"])
async def test_a_gather_never_takes_the_result_of_a_job_that_is_not_its_child(
    app: Penstock, sql: Sql, state: str, name: str
) -> None:
    @app.job("resize", keep_result=True)
    async def resize(job: Job[int]) -> int:
        return job.data * 10

    taken: list[UUID] = []

    @app.job("order", keep_result=True, max_attempts=2, backoff=Backoff(base=timedelta(0)))
    async def order(job: Job[Any]) -> Any:
        if not taken:
            # The group is there as soon as the step has begun: what its owner alone can find out.
            await (await app.database()).fetch(
                "select * from penstock.begin_waits(array[$1::uuid], array(select lease from penstock.queued_jobs where id = $1),"
                " '{gather}', '{parts}')",
                job.id,
            )
            taken.append(
                await sql.fetchval(
                    "select (penstock.derived_ids(created_at, array['child ' || id || ' 2 0']))[1] from penstock.job_groups"
                )
            )
            await take(sql, taken[0], state, name)
        return await job.gather("parts", [resize.child(part) for part in range(1, 4)])

    receipt = await order.enqueue({})
    await run_due_jobs(app, "order", "resize")
    await run_due_jobs(app, "order", "resize")
    assert (await app.find(receipt.id)).result == [10, 20, 30]


async def test_the_ids_of_children_are_for_who_holds_their_parent(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('order')")
    id = await sql.fetchval("select penstock.enqueue('order')")
    [job] = await sql.fetch("select * from penstock.claim('w', '{order}', 1)")
    begin = "select state from penstock.begin_waits(array[$1::uuid], array[$2::bigint], '{gather}', '{parts}')"
    assert await sql.fetchval(begin, id, job["lease"]) == "new"
    children = "select penstock.child_ids($1, $2, $3, '{order,order}')"
    ids = await sql.fetchval(children, id, job["lease"], "parts")
    assert len({*ids}) == 2
    assert await sql.fetchval(children, id, job["lease"], "parts") == ids
    for wrong in ((id, job["lease"] + 1, "parts"), (id, job["lease"], "other"), (uuid4(), job["lease"], "parts")):
        assert await sql.fetchval(children, *wrong) is None
    await sql.execute("select penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint])", id, job["lease"])
    assert await sql.fetchval(children, id, job["lease"], "parts") is None


async def test_children_are_found_again_when_the_secret_is_renewed_meanwhile(app: Penstock, sql: Sql) -> None:
    runs: list[int] = []

    @app.job("resize", keep_result=True)
    async def resize(job: Job[int]) -> int:
        runs.append(job.data)
        await (await app.database()).fetch("select penstock.renew_id_secret()")
        return job.data * 10

    @app.job("order", keep_result=True, max_attempts=2, backoff=Backoff(base=timedelta(0)))
    async def order(job: Job[Any]) -> Any:
        parts = await job.gather("parts", [resize.child(part) for part in range(3)])
        if job.attempt == 1:
            raise Retry("again")
        return parts

    receipt = await order.enqueue({})
    async with running_worker(app):
        assert (await app.wait(receipt.id)).result == [0, 10, 20]
    assert sorted(runs) == [0, 1, 2]


# -- copies of messages


async def foreseen(sql: Sql, numbers: list[int]) -> None:
    """Let publishes take these numbers for the ranges of copies, and then random ones, with the clock held still."""
    await sql.execute("create sequence foreseen_calls")
    await sql.execute(
        f"""
        create or replace function penstock.random_number() returns bigint language sql volatile as $$
            select coalesce(
                ('{{{",".join(map(str, numbers))}}}'::bigint[])[nextval('public.foreseen_calls')],
                ('x' || left(gen_random_uuid()::text, 8))::bit(32)::bigint
            )
        $$
        """
    )


@pytest.mark.parametrize("way", ["publish", "publish_many", "unique", "many unique"])
async def test_a_publish_whose_ids_are_taken_takes_others(app: Penstock, sql: Sql, way: str) -> None:
    topic = app.topic("memos")
    for client in ("bob", "alice"):
        await topic.subscribe(client)
    await sql.execute("select penstock.create_job_type('thief')")
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    await foreseen(sql, [1, 2])
    database = await app.database()
    numbers = await sql.fetch("select number from penstock.subscriptions order by number")
    for number in (1, 2, 3):
        for subscription in numbers:
            await sql.execute(
                "select penstock.enqueue('thief', '{}', penstock.copy_id(penstock.first_copy_id($1, $2), $3),"
                " p_run_after => now() + interval '1 day')",
                moment,
                number,
                subscription["number"],
            )
    call = {
        "publish": "select id, receivers from penstock.publish('memos', '1')",
        "publish_many": "select id, receivers from penstock.publish_many('memos', '{1,2}')",
        "unique": "select id, receivers from penstock.publish('memos', '1', p_unique_key => 'k')",
        "many unique": "select id, receivers from penstock.publish_many('memos', '{1,2}', p_unique_keys => '{k,l}')",
    }[way]
    await sql.execute(f"set penstock.clock = '{moment.isoformat()}'")
    published = await sql.fetch(call)
    await sql.execute("reset penstock.clock")
    assert [row["receivers"] for row in published] == [2] * len(published)
    for row in published:
        outcomes = await database.fetch("select client_id, status from penstock.outcomes($1)", row["id"])
        assert [tuple(one) for one in outcomes] == [("alice", "queued"), ("bob", "queued")]


async def test_jobs_among_the_ids_of_copies_forge_no_outcome_hold_up_no_publisher_and_are_not_erased(
    app: Penstock, sql: Sql
) -> None:
    topic = app.topic("memos")
    await topic.subscribe("bob")
    receipt = await topic.publish({"n": 1}, key="acme")
    first = await sql.fetchval("select first_copy from penstock.topic_messages")
    await sql.execute("select penstock.create_job_type('memos_eve')")
    forged = await sql.fetchval("select penstock.enqueue('memos_eve', '{}', penstock.copy_id($1, 99999))", first)
    outcomes = await sql.fetch("select client_id from penstock.outcomes($1)", receipt.id)
    assert [one["client_id"] for one in outcomes] == ["bob"]
    [copy] = await sql.fetch("select * from penstock.claim('w', '{memos_bob}', 1)")
    await sql.execute("select penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint])", copy["id"], copy["lease"])
    assert await sql.fetchval("select penstock.unfinished_copies($1)", receipt.id) is False
    await sql.execute('select penstock.start_erasure(\'{"key": "acme"}\')')
    while await sql.fetchval("select id from penstock.advance_operation()"):
        pass
    assert await sql.fetchval("select count(*) from penstock.topic_messages") == 0
    assert await sql.fetchval("select status from penstock.find_jobs(array[$1::uuid])", forged) == "queued"


async def test_who_has_a_copy_cannot_take_the_ids_of_those_of_later_subscribers(app: Penstock, sql: Sql) -> None:
    topic = app.topic("memos", catch_up=10)
    await topic.subscribe("eve")
    for n in range(3):
        await topic.publish(n)
    await sql.execute("select penstock.create_job_type('thief')")
    for row in await sql.fetch("select id from penstock.queued_jobs where name = 'memos_eve'"):
        # What eve sees of its own copy, with numbers that follow.
        for more in range(1, 50):
            await sql.execute(
                "select penstock.enqueue('thief', '{}', $1, p_run_after => now() + interval '1 day')",
                UUID(int=row["id"].int + more),
            )
    late = await topic.subscribe("bob")
    assert late.replayed == 3
    copies = await sql.fetch("select id, data from penstock.claim('w', '{memos_bob}', 10)")
    assert [json.loads(copy["data"]) for copy in copies] == [0, 1, 2]
    messages = await sql.fetch("select id from penstock.topic_messages order by number")
    for message in messages:
        outcomes = await sql.fetch("select client_id from penstock.outcomes($1)", message["id"])
        assert [one["client_id"] for one in outcomes] == ["bob", "eve"]
    # Handed out and lost on the way: found again under the same ids.
    await sql.execute(
        "select penstock.settle(array_agg(id), array_agg(attempt), array_agg(lease)) from penstock.queued_jobs"
        " where name = 'memos_bob'"
    )
    missed = await sql.fetch("select seq from penstock.missed_messages('memos', 'bob', 0)")
    assert [row["seq"] for row in missed] == [1, 2, 3]


async def test_a_message_id_of_another_topic_is_a_conflict_that_says_nothing_of_it(app: Penstock, sql: Sql) -> None:
    mine, theirs = app.topic("mine"), app.topic("secret-plans")
    await mine.declare()
    id = (await theirs.publish("secret")).id
    for call in (mine.publish(1, id=id), mine.publish_many([NewMessage(1), NewMessage(2, id=id)])):
        with pytest.raises(Conflict, match="published to another topic") as refused:
            await call
        assert "secret" not in str(refused.value)


# -- jobs under ids of others


MANY, PUT = (f"penstock.{name}('mine', '{{1}}', array[$1::uuid]" for name in ("enqueue_many", "put_jobs"))
AFTER = "p_options => array[jsonb_build_object('after', array[penstock.enqueue('mine')])]"
WAYS = {
    "many": f"{MANY})",
    "unique": f"{MANY}, p_unique_keys => '{{k}}')",
    "unique for": f"{MANY}, p_unique_keys => '{{k}}', p_options => array['{{\"unique_for\": 60}}'::jsonb])",
    "after": f"{MANY}, {AFTER})",
    "group": f"{MANY}, p_options => array[jsonb_build_object('group', penstock.open_group('g'))])",
    "json": "penstock.enqueue_json('mine', jsonb_build_array(jsonb_build_object('id', $1::uuid)))",
    "put": f"{PUT})",
    "put unique": f"{PUT}, p_unique_keys => '{{k}}')",
    "put after": f"{PUT}, {AFTER})",
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", WAYS)
async def test_the_id_of_a_job_of_another_type_is_taken_and_nothing_else_is_said(
    app: Penstock, sql: Sql, way: str, state: str
) -> None:
    await sql.execute("select penstock.create_job_type('mine')")
    id = uuid4()
    await take(sql, id, state)
    [row] = await sql.fetch(f"select outcome, jsonb_strip_nulls(to_jsonb(found)) as found from {WAYS[way]} as found", id)
    assert row["outcome"] == "taken"
    assert json.loads(row["found"]) == {"ordinal": 1, "id": str(id), "outcome": "taken"}
    stored = "select name from penstock.queued_jobs where id = $1 union all select name from penstock.waiting_jobs where id = $1"
    assert [found["name"] for found in await sql.fetch(stored, id)] == ([] if state == "archived" else ["thief"])
    assert await sql.fetchval("select coalesce(sum(added), 0) from penstock.workflow_ticks") == 0


@pytest.mark.parametrize("state", STATES)
async def test_a_tenant_learns_of_the_id_of_another_that_it_is_known_and_nothing_else(tenant: Sql, sql: Sql, state: str) -> None:
    await sql.execute("grant execute on function tenant.enqueue(jsonb, uuid) to test_tenant")
    id = uuid4()
    await take(sql, id, state, "theirs")
    with pytest.raises(asyncpg.PostgresError) as refused:
        await tenant.fetchval("select tenant.enqueue('1', $1)", id)
    assert (refused.value.sqlstate, refused.value.message) == ("PS409", f"the id {id} belongs to another job")


async def test_a_tenant_holds_no_job_of_another_back_with_its_id(tenant: Sql, sql: Sql) -> None:
    await sql.execute("grant execute on function tenant.enqueue(jsonb, uuid) to test_tenant")
    id = uuid4()
    await take(sql, id, "waiting", "theirs")
    transaction = tenant.transaction()
    await transaction.start()
    savepoint = tenant.transaction()
    await savepoint.start()
    with pytest.raises(asyncpg.PostgresError):
        await tenant.fetchval("select tenant.enqueue('1', $1)", id)
    await savepoint.rollback()
    await sql.execute("set lock_timeout = '5s'")
    assert await sql.fetchval("select penstock.cancel($1)", id) == "cancelled"
    await transaction.rollback()


async def test_a_call_in_python_says_that_an_id_is_taken(app: Penstock, sql: Sql) -> None:
    id = uuid4()
    await take(sql, id)
    await sql.execute("select penstock.create_job_type('mine')")
    with pytest.raises(Conflict, match=f"the id {id} belongs to another job"):
        await app.enqueue("mine", {}, id=id)
    receipts = await app.enqueue_many("mine", [NewJob(1), NewJob(2, id=id)])
    assert [receipt.outcome for receipt in receipts] == [EnqueueOutcome.QUEUED, EnqueueOutcome.TAKEN]


async def test_a_replay_under_the_id_of_another_job_is_a_conflict(app: Penstock, sql: Sql) -> None:
    original, other = uuid4(), uuid4()
    await take(sql, original, "archived")
    await sql.execute("select penstock.enqueue('thief', '1', $1)", other)
    for id in (other, original):
        with pytest.raises(asyncpg.PostgresError, match="belongs to another job") as refused:
            await sql.fetchval("select penstock.replay($1, $2)", original, id)
        assert refused.value.sqlstate == "PS409"
    new = uuid4()
    assert [await sql.fetchval("select penstock.replay($1, $2)", original, new) for _ in range(2)] == [new, new]


async def test_a_staged_row_with_the_id_of_another_job_is_refused_and_not_lost(app: Penstock, sql: Sql) -> None:
    id = uuid4()
    await take(sql, id)
    await sql.execute("select penstock.create_job_type('mine')")
    for place, staged in enumerate((uuid4(), id)):
        await sql.execute(
            "insert into penstock.staged_jobs (writer, part, place, name, data, id) values ('w', '1.p', $1, 'mine', '{}', $2)",
            place,
            str(staged),
        )
    with pytest.raises(asyncpg.PostgresError, match=f"the id {id} of a row for mine belongs to another job") as refused:
        await sql.fetch("select * from penstock.commit_staged('w', 1, '{1.p}', 2, 'job mine')")
    assert refused.value.sqlstate == "PS409"
    assert await sql.fetchval("select count(*) from penstock.queued_jobs where name = 'mine'") == 0
