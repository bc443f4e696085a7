"""The SQL protocol as any client sees it, through plain SQL."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from penstock import Penstock, Settings
from penstock.postgres.database import Database
from penstock.postgres.migrate import migrate

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture(autouse=True)
async def ship(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship', '{\"max_attempts\": 3, \"backoff_jitter\": 0}')")


async def claim(sql: Sql, limit: int = 10, worker: str = "w1", name: str = "ship") -> list[Any]:
    return list(await sql.fetch("select * from penstock.claim($1, array[$2], $3)", worker, name, limit))


async def settle(sql: Sql, job: Any, outcome: str = "succeeded", *, attempt: int | None = None, lease: int | None = None) -> Any:
    rows = await sql.fetch(
        "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array[$4])",
        job["id"], job["attempt"] if attempt is None else attempt, lease or job["lease"], outcome,
    )  # fmt: skip
    return rows[0]["outcome"] if rows else "succeeded"


async def at(sql: Sql, seconds: float) -> None:
    """Hold the clock some seconds from the first call on."""
    await sql.execute(
        "select set_config('penstock.clock', (coalesce(nullif(current_setting('test.start', true), ''),"
        " set_config('test.start', now()::text, false))::timestamptz + make_interval(secs => $1))::text, false)",
        seconds,
    )


async def status(sql: Sql, id: UUID) -> tuple[str, int] | None:
    row = await sql.fetchrow("select status, attempt from penstock.find_jobs(array[$1::uuid])", id)
    return None if row is None else (row["status"], row["attempt"])


async def test_a_job_goes_from_the_queue_to_the_archive(sql: Sql) -> None:
    id = await sql.fetchval("select penstock.enqueue('ship', '{\"shipmentId\": \"shp_123\"}')")
    (job,) = await claim(sql)
    assert (job["id"], json.loads(job["data"]), job["attempt"]) == (id, {"shipmentId": "shp_123"}, 1)
    assert await claim(sql) == []
    assert await settle(sql, job) == "succeeded"
    assert await status(sql, id) == ("succeeded", 1)
    assert await sql.fetchval("select count(*) from penstock.leases") == 0


async def test_an_enqueue_belongs_to_the_callers_transaction(sql: Sql) -> None:
    transaction = sql.transaction()
    await transaction.start()
    id = await sql.fetchval("select penstock.enqueue('ship')")
    await transaction.rollback()
    assert await status(sql, id) is None


@pytest.mark.parametrize("archived", [False, True])
async def test_the_same_id_is_the_same_job(sql: Sql, archived: bool) -> None:
    id = uuid4()
    for _ in range(2):
        assert await sql.fetchval("select penstock.enqueue('ship', p_id => $1)", id) == id
        if archived:
            for job in await claim(sql):
                await settle(sql, job)
    assert await sql.fetchval("select count(*) from penstock.find_jobs(array[$1::uuid])", id) == 1


async def test_a_quarantined_job_is_archived_as_failed_with_the_reason(sql: Sql) -> None:
    id = await sql.fetchval("select penstock.enqueue('ship', '{}', p_key => 'acme')")
    (job,) = await claim(sql)
    rows = await sql.fetch(
        "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array['quarantined'],"
        " array['{\"type\": \"Quarantined\", \"message\": \"it ended two workers\"}'::jsonb])",
        id, job["attempt"], job["lease"],
    )  # fmt: skip
    assert [tuple(row) for row in rows] == [(id, "failed")]
    archived = await sql.fetchrow("select status, reason, errors from penstock.archived_jobs where id = $1", id)
    (error,) = json.loads(archived["errors"])
    assert (archived["status"], archived["reason"], error["type"]) == ("failed", "quarantined", "Quarantined")
    await sql.fetchval("select penstock.enqueue('ship')")
    (other,) = await claim(sql)
    await settle(sql, other, "failed-for-good")
    assert await sql.fetchval("select reason from penstock.archived_jobs where id = $1", other["id"]) is None


async def test_a_batch_reports_what_was_not_simply_queued(sql: Sql) -> None:
    ids = [uuid4() for _ in range(4)]
    await sql.execute("select penstock.enqueue('ship', p_id => $1)", ids[0])
    (job,) = await claim(sql)
    await settle(sql, job)
    await sql.execute("select penstock.enqueue('ship', p_id => $1)", ids[1])
    rows = await sql.fetch(
        "select ordinal, id, outcome from penstock.enqueue_many('ship', array_fill('{}'::jsonb, array[5]), $1)", [*ids, ids[3]]
    )
    outcomes = {row["ordinal"]: row["outcome"] for row in rows if row["outcome"] != "queued"}
    assert outcomes == {1: "archived", 2: "duplicate", 5: "duplicate"}
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 3


async def test_unique_coalesces_until_the_job_is_claimed_and_again_when_it_waits_for_a_retry(sql: Sql) -> None:
    enqueue = "select penstock.enqueue('ship', p_unique_key => 'acme')"
    first = await sql.fetchval(enqueue)
    assert await sql.fetchval(enqueue) == first
    (job,) = await claim(sql)
    await settle(sql, job, "failed")
    assert await sql.fetchval(enqueue) == first
    await sql.execute("update penstock.queued_jobs set run_after = now() - interval '1 s'")
    await sql.execute("select penstock.promote()")
    (job,) = await claim(sql)
    second = await sql.fetchval(enqueue)
    assert second != first
    await settle(sql, job, "failed")
    assert await sql.fetchval(enqueue) == second


async def test_a_coalesced_job_is_not_claimed_before_the_caller_commits(sql: Sql, url: str) -> None:
    other = await asyncpg.connect(url)
    try:
        await sql.execute("select penstock.enqueue('ship', p_unique_key => 'acme')")
        transaction = other.transaction()
        await transaction.start()
        await other.execute("select penstock.enqueue('ship', p_unique_key => 'acme')")
        assert await claim(sql) == []
        await transaction.commit()
        assert len(await claim(sql)) == 1
    finally:
        other.terminate()


async def test_priority_then_age_decides(sql: Sql) -> None:
    for name, priority in (("c", 0), ("d", 0), ("a", -5), ("e", 10), ("b", -5)):
        await sql.execute("select penstock.enqueue('ship', to_jsonb($1::text), p_priority => $2)", name, priority)
    assert [json.loads(job["data"]) for job in await claim(sql, 3)] == ["a", "b", "c"]
    assert [json.loads(job["data"]) for job in await claim(sql, 3)] == ["d", "e"]


async def test_a_deferred_job_waits_for_its_time(sql: Sql) -> None:
    await at(sql, 0)
    await sql.execute("select penstock.enqueue('ship', p_run_after => penstock.clock() + interval '10 s')")
    await sql.execute("select penstock.promote()")
    assert await claim(sql) == []
    await at(sql, 10)
    assert await sql.fetchval("select promoted from penstock.promote()") == 1
    assert len(await claim(sql)) == 1


async def test_a_deferred_job_can_be_made_due_at_once(sql: Sql) -> None:
    deferred = await sql.fetchval("select penstock.enqueue('ship', '1', p_run_after => now() + interval '1 day')")
    waiting = await sql.fetchval("select penstock.enqueue('ship', '2')")
    made_due = await sql.fetch("select * from penstock.run_now($1)", [deferred, waiting, uuid4()])
    assert [row["run_now"] for row in made_due] == [deferred]
    assert {job["id"] for job in await claim(sql)} == {deferred, waiting}
    assert await sql.fetch("select * from penstock.run_now($1)", [deferred]) == []


async def test_an_expired_job_never_runs(sql: Sql) -> None:
    await at(sql, 0)
    id = await sql.fetchval("select penstock.enqueue('ship', p_expires_at => penstock.clock() + interval '5 s')")
    await at(sql, 6)
    assert await claim(sql) == []
    assert await status(sql, id) == ("expired", 0)


async def test_failures_back_off_and_end_the_job(sql: Sql) -> None:
    await at(sql, 0)
    id = await sql.fetchval("select penstock.enqueue('ship')")
    delays = []
    for attempt in (1, 2, 3):
        (job,) = await claim(sql)
        assert job["attempt"] == attempt
        outcome = await settle(sql, job, "failed")
        if outcome == "retried":
            delays.append(await sql.fetchval("select extract(epoch from run_after - penstock.clock()) from penstock.queued_jobs"))
            await sql.execute("select set_config('penstock.clock', (penstock.clock() + interval '1 min')::text, false)")
            await sql.execute("select penstock.promote()")
    assert [float(delay) for delay in delays] == [2.0, 4.0]
    assert await status(sql, id) == ("failed", 3)
    errors = json.loads(await sql.fetchval("select errors from penstock.find_jobs(array[$1::uuid])", id))
    assert [error["attempt"] for error in errors] == [1, 2, 3]


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "failed-for-good", "cancelled", "released"])
async def test_a_stale_attempt_is_refused_whatever_it_says(sql: Sql, outcome: str) -> None:
    await sql.execute("select penstock.enqueue('ship')")
    (job,) = await claim(sql)
    assert await settle(sql, job, outcome, attempt=2) == "stale"
    assert await settle(sql, job, outcome, lease=job["lease"] + 1) == "stale"
    assert await status(sql, job["id"]) == ("in-progress", 1)


async def test_the_lease_ends_and_the_first_worker_can_no_longer_settle(sql: Sql) -> None:
    await at(sql, 0)
    await sql.execute("select penstock.enqueue('ship')")
    (job,) = await claim(sql)
    await at(sql, 301)
    assert await sql.fetchval("select penstock.recover()") == 1
    (again,) = await claim(sql, worker="w2")
    assert (again["id"], again["attempt"]) == (job["id"], 2)
    assert await settle(sql, job) == "stale"
    assert await settle(sql, again) == "succeeded"


async def test_an_extended_lease_does_not_end(sql: Sql) -> None:
    await at(sql, 0)
    await sql.execute("select penstock.enqueue('ship')")
    await sql.execute("select penstock.enqueue('ship')")
    jobs = await claim(sql)
    await at(sql, 200)
    (extended,) = await sql.fetch(
        "select * from penstock.extend(array[$1::uuid], array[1::smallint], array[$2::bigint])", jobs[0]["id"], jobs[0]["lease"]
    )
    await at(sql, 301)
    assert await sql.fetchval("select penstock.recover()") == 1
    assert await settle(sql, jobs[0], lease=extended["lease"]) == "succeeded"
    assert await settle(sql, jobs[1]) == "stale"


async def test_the_jobs_of_a_dead_worker_come_back(sql: Sql) -> None:
    await at(sql, 0)
    await sql.execute("select penstock.register_worker('w1', '{ship}')")
    await sql.execute("select penstock.enqueue('ship')")
    await claim(sql)
    await at(sql, 9)
    assert await sql.fetchval("select known from penstock.heartbeat('w1')")
    await at(sql, 14)
    assert await sql.fetchval("select penstock.recover()") == 0
    # Silent for three fifths of the ten seconds: from here on it is suspected.
    await at(sql, 15.5)
    assert await sql.fetchval("select penstock.recover()") == 0
    await at(sql, 20)
    assert await sql.fetchval("select penstock.recover()") == 0
    await at(sql, 21)
    assert await sql.fetchval("select penstock.recover()") == 1
    assert not await sql.fetchval("select known from penstock.heartbeat('w1')")
    assert len(await claim(sql, worker="w2")) == 1


async def test_an_at_most_once_job_is_never_started_twice(sql: Sql) -> None:
    await at(sql, 0)
    await sql.execute("select penstock.create_job_type('charge', '{\"delivery_strategy\": \"at_most_once\"}')")
    id = await sql.fetchval("select penstock.enqueue('charge')")
    assert len(await claim(sql, name="charge")) == 1
    await at(sql, 301)
    await sql.execute("select penstock.recover()")
    assert await claim(sql, name="charge") == []
    assert await status(sql, id) == ("failed", 1)


async def test_concurrency_is_exact_over_connections(sql: Sql, url: str) -> None:
    await sql.execute("select penstock.change_job_type('ship', '{\"concurrency\": 5}')")
    await sql.execute("select penstock.enqueue_many('ship', array_fill('{}'::jsonb, array[50]))")
    others = [await asyncpg.connect(url) for _ in range(4)]
    try:
        claimed = await asyncio.gather(*(claim(other, 10, f"w{n}") for n, other in enumerate(others)))
    finally:
        for other in others:
            other.terminate()
    jobs = [job for batch in claimed for job in batch]
    assert len(jobs) == 5
    await settle(sql, jobs[0])
    assert len(await claim(sql)) == 1


async def test_a_rate_limit_is_never_exceeded_in_any_period(sql: Sql) -> None:
    await sql.execute('select penstock.change_job_type(\'ship\', \'{"rate_limit": 10, "rate_period": "1 s"}\')')
    await sql.execute("select penstock.enqueue_many('ship', array_fill('{}'::jsonb, array[100]))")
    starts: list[tuple[float, int]] = []
    for step in range(60):
        await at(sql, step * 0.05)
        starts.append((step * 0.05, len(await claim(sql, 7))))
    for begin, _ in starts:
        assert sum(n for time, n in starts if begin <= time < begin + 1.0 - 1e-9) <= 10
    assert sum(n for _, n in starts) >= 28


@pytest.mark.parametrize("earlier", ["queued", "in-progress", "succeeded"])
async def test_a_second_replay_is_refused_unless_forced_and_a_job_shows_its_replays(sql: Sql, earlier: str) -> None:
    id = await sql.fetchval("select penstock.enqueue('ship', '1')")
    await settle(sql, (await claim(sql))[0])
    first = await sql.fetchval("select penstock.replay($1)", id)
    # The same call once more is the same replay.
    assert await sql.fetchval("select penstock.replay($1, $2)", id, first) == first
    if earlier != "queued":
        (job,) = await claim(sql)
        if earlier == "succeeded":
            await settle(sql, job)
    with pytest.raises(asyncpg.PostgresError, match=f"was replayed already as {first}, which is {earlier}"):
        await sql.execute("select penstock.replay($1)", id)
    forced = await sql.fetchval("select penstock.replay($1, p_force => true)", id)
    assert await sql.fetchval("select replayed_by from penstock.find_jobs(array[$1::uuid])", id) == sorted([first, forced])


async def test_a_failed_replay_is_no_reason_to_refuse_another(sql: Sql) -> None:
    id = await sql.fetchval("select penstock.enqueue('ship', '1')")
    await settle(sql, (await claim(sql))[0])
    first = await sql.fetchval("select penstock.replay($1)", id)
    await sql.execute("select penstock.cancel($1)", first)
    assert await sql.fetchval("select penstock.replay($1)", id) != first


async def test_cancel_pause_and_replay(sql: Sql) -> None:
    queued = await sql.fetchval("select penstock.enqueue('ship')")
    assert await sql.fetchval("select penstock.cancel($1)", queued) == "cancelled"
    assert await sql.fetchval("select penstock.cancel($1)", queued) == "cancelled"
    assert await status(sql, queued) == ("cancelled", 0)
    copy = await sql.fetchval("select penstock.replay($1)", queued)
    await sql.execute("select penstock.pause('ship')")
    assert await claim(sql) == []
    await sql.execute("select penstock.resume('ship')")
    (job,) = await claim(sql)
    assert job["id"] == copy
    assert await sql.fetchval("select penstock.cancel($1)", copy) == "cancelling"
    assert await settle(sql, job, "failed") == "cancelled"


async def test_a_released_job_keeps_its_attempt_and_its_place(sql: Sql) -> None:
    first = await sql.fetchval("select penstock.enqueue('ship')")
    await sql.execute("select penstock.enqueue('ship')")
    (job,) = await claim(sql, 1)
    assert await settle(sql, job, "released") == "released"
    (again,) = await claim(sql, 1)
    assert (again["id"], again["attempt"]) == (first, 1)
    assert await settle(sql, job) == "stale"


async def test_jobs_whose_claim_was_never_heard_of_are_handed_back(sql: Sql) -> None:
    await sql.execute("select penstock.enqueue_many('ship', array_fill('{}'::jsonb, array[3]))")
    (known,) = await claim(sql, 1)
    await claim(sql, 10)
    assert await sql.fetchval("select penstock.release_unknown('w1', array[$1::bigint])", known["lease"]) == 2
    assert len(await claim(sql)) == 2


async def test_pruning_drops_whole_days_and_keeps_ids_for_the_retention_time(sql: Sql) -> None:
    id = uuid4()
    await sql.execute("select set_config('penstock.clock', '2026-01-01T12:00:00Z', false)")
    await sql.execute("select penstock.enqueue('ship', p_id => $1)", id)
    (job,) = await claim(sql)
    await settle(sql, job)
    await sql.execute("select set_config('penstock.clock', '2026-01-03T12:00:00Z', false)")
    assert await sql.fetch("select * from penstock.prune('2 days')") == []
    await sql.execute("select penstock.enqueue('ship', p_id => $1)", id)
    assert await claim(sql) == []
    (dropped,) = await sql.fetch("select * from penstock.prune('1 day')")
    assert tuple(dropped) == ("archived_jobs_p20260101", 1)
    await sql.execute("select penstock.enqueue('ship', p_id => $1)", id)
    assert len(await claim(sql)) == 1


async def test_roles_can_do_what_they_were_granted_and_nothing_else(sql: Sql) -> None:
    for access in ("reader", "producer", "worker", "admin"):
        await sql.execute(f"do $$ begin create role test_{access}; exception when duplicate_object then null; end $$")
        await sql.execute("select penstock.grant_access($1::name, $2)", f"test_{access}", access)
    calls = {
        "select count(*) from penstock.queued_jobs": {"reader", "producer", "worker", "admin"},
        "select penstock.enqueue('ship')": {"producer", "worker", "admin"},
        "select penstock.claim('w', '{ship}', 1)": {"worker", "admin"},
        "select penstock.pause('ship')": {"admin"},
        "insert into penstock.type_priorities values ('x', 0)": set(),
        "delete from penstock.archived_jobs": set(),
    }
    for call, allowed in calls.items():
        for access in ("reader", "producer", "worker", "admin"):
            transaction = sql.transaction()
            await transaction.start()
            await sql.execute(f"set local role test_{access}")
            try:
                await sql.execute(call)
                worked = True
            except asyncpg.InsufficientPrivilegeError:
                worked = False
            finally:
                await transaction.rollback()
            assert worked == (access in allowed), f"{access}: {call}"
    for access in ("reader", "producer", "worker", "admin"):
        await sql.execute(f"drop owned by test_{access}")


async def test_ten_processes_may_migrate_at_once(url: str, sql: Sql) -> None:
    await sql.execute("drop schema penstock cascade")
    done = await asyncio.gather(*(migrate(Database(url, Settings())) for _ in range(10)))
    assert sum(bool(migrated.tables) for migrated in done) == 1
    async with Penstock(url) as app:
        assert await app.counts() == []


async def test_the_types_of_a_claim_share_its_limit(sql: asyncpg.Connection[Any]) -> None:
    for name, jobs in {"a": 50, "b": 50, "c": 2, "paused": 50, "none": 0}.items():
        await sql.execute("select penstock.create_job_type($1)", name)
        await sql.execute(
            "select count(*) from penstock.enqueue_many($1, array_fill('{}'::jsonb, array[$2::integer]))", name, jobs
        )
    await sql.execute("select penstock.pause('paused')")

    async def claimed(names: list[str], limit: int, options: str = "") -> dict[str, int]:
        claim = f"select name, count(*) from penstock.claim('w', $1, $2{options}) group by name"
        return dict(await sql.fetch(claim, names, limit))

    # What one leaves goes to the others.
    assert await claimed(["paused", "none", "a", "b", "c"], 12) == {"a": 5, "b": 5, "c": 2}
    # With more types than jobs to claim the first ones get one each.
    assert await claimed(["b", "a"], 1) == {"b": 1}
    assert await claimed(["a", "b"], 10, ", p_most => '{1,3}'") == {"a": 1, "b": 3}
    assert await claimed(["a", "b"], 10, ", p_shared => false") == {"a": 10}
    for most in ("{1}", "{1,-1}", "{{1,1}}"):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await claimed(["a", "b"], 10, f", p_most => '{most}'")
        assert refused.value.sqlstate == "PS400"
