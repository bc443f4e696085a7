"""Standing jobs: one run a key, from start to stop, moved with its state; and the races that others had."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Conflict, InvalidInput, JobFailed, NotFound, Penstock, Settings, Standing
from penstock.groups import heartbeat, trials
from penstock.pools import queries
from penstock.pools.pool import Pool
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"


class Runs:
    """What a handler saw: how many run of each key, how often each was started, and messages."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self.states: list[tuple[str, Any]] = []
        self.messages: list[tuple[str, Any]] = []
        self.data: dict[str, Any] = {}

    def on(self, pool: Pool[Any]) -> Runs:
        @pool.standing
        async def run(job: Standing[Any]) -> AsyncIterator[None]:
            self.begin(job)
            listening = asyncio.create_task(self.listen(job))
            try:
                yield
            finally:
                listening.cancel()
                self.running[job.key] -= 1
            job.state = {"runs": self.starts[job.key]}

        return self

    def begin(self, job: Standing[Any]) -> None:
        self.starts[job.key] += 1
        self.running[job.key] += 1
        self.most[job.key] = max(self.most[job.key], self.running[job.key])
        self.states.append((job.key, job.state))
        self.data[job.key] = job.data

    async def listen(self, job: Standing[Any]) -> None:
        async for message in job.messages():
            self.messages.append((job.key, message))

    @property
    def now(self) -> set[str]:
        return {key for key, count in self.running.items() if count}


async def test_a_worker_without_a_handler_says_why_nothing_runs(url: str) -> None:
    async with Penstock(url) as plain:
        pool = plain.pool("tenants", slots=16)
        async with pool.worker("puller"):
            with pytest.raises(
                JobFailed, match="NoHandler: worker puller owns the key and has no handler for standing jobs of tenants"
            ):
                await pool.start("acme", timeout=timedelta(seconds=30))
            # One that comes later, and one that was there before the worker.
            assert await pool.start("blue") == "starting"

            async def both_said() -> bool:
                return [(job.error or {}).get("type") for job in await pool.standing_jobs()] == ["NoHandler"] * 2

            await eventually(both_said, "the reason for both")
        async with pool.worker("next"):

            async def said_by_the_next() -> bool:
                return all("next" in (job.error or {})["message"] for job in await pool.standing_jobs())

            await eventually(said_by_the_next, "the reason with the new owner")
    async with Penstock(url) as app:
        pool = app.pool("tenants", slots=16)
        runs = Runs().on(pool)
        async with Workers(app):
            await eventually(lambda: runs.now == {"acme", "blue"}, "the standing jobs run")
            assert [(job.error, job.failures) for job in await pool.standing_jobs()] == [(None, 0)] * 2


@pytest.fixture
def pool(app: Penstock) -> Pool[Any]:
    return app.pool("tenants", slots=16)


async def test_it_runs_from_start_to_stop_and_leaves_a_state(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    async with Workers(app):
        assert await pool.start("acme", {"interval": 60}) == "starting"
        await eventually(lambda: runs.now == {"acme"})
        assert await pool.start("acme", {"interval": 60}) == "unchanged"
        with pytest.raises(Conflict, match="another payload"):
            await pool.start("acme", {"interval": 1})
        assert await pool.start("acme", {"interval": 1}, replace=True) == "replaced"
        await eventually(lambda: runs.data["acme"] == {"interval": 1})
        assert runs.states == [("acme", None), ("acme", {"runs": 1})]
        assert await pool.stop("acme")
        await eventually(lambda: runs.now == set())
        assert not await pool.stop("acme")
    assert runs.most["acme"] == 1


async def test_it_moves_with_its_state_when_workers_come_and_go(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    keys = {f"t{n}" for n in range(20)}
    async with Workers(app) as working:
        for key in keys:
            await pool.start(key)
        await eventually(lambda: runs.now == keys)
        assert sum(runs.starts.values()) == 20
        await working.add()
        await eventually(lambda: sum(runs.starts.values()) > 20, "a move")
        await eventually(lambda: runs.now == keys)
        moved = sum(runs.starts.values()) - 20
        await working.remove(working.workers[0][0])
        await eventually(lambda: runs.now == keys and sum(runs.starts.values()) == 40, "the return of those that stayed")
    assert 0 < moved < 20
    assert set(runs.most.values()) == {1}
    assert all(state == {"runs": 1} for key, state in runs.states[20 : 20 + moved])


async def test_a_large_set_is_reconciled_as_a_whole(app: Penstock, pool: Pool[Any], sql: Any) -> None:
    await pool.declare()
    # A call for each key would take longer than this.
    await sql.execute("set statement_timeout = '15s'")
    reconcile = "select * from penstock.reconcile_standing($1, $2::jsonb)"

    async def become(wanted: dict[str, int]) -> tuple[int, ...]:
        return tuple(await sql.fetchrow(reconcile, pool.name, json.dumps(wanted)))

    many = {f"tenant-{n}": n for n in range(30_000)}
    assert await become(many) == (30_000, 0, 0)
    assert await become(many) == (0, 0, 0)
    # One of them runs: it is not gone before it has stopped, and is started again when it is wanted again.
    await sql.execute(
        "update penstock.standing_jobs set running_by = 'w', state = '1', failures = 3 where key in ('tenant-1', 'tenant-2')"
    )
    assert await become({key: data + 1 for key, data in many.items() if key != "tenant-1"}) == (0, 29_999, 1)
    rows = {row["key"]: row for row in await sql.fetch("select * from penstock.standing_jobs where running_by is not null")}
    assert (rows["tenant-1"]["wanted"], rows["tenant-1"]["version"]) == (False, 1)
    of_second = rows["tenant-2"]
    assert (of_second["wanted"], of_second["version"], of_second["state"], of_second["failures"]) == (True, 2, "1", 0)
    assert await become({"tenant-1": 1, "tenant-2": 3}) == (1, 0, 29_998)
    rows = {row["key"]: row for row in await sql.fetch("select * from penstock.standing_jobs")}
    assert set(rows) == {"tenant-1", "tenant-2"}
    assert (rows["tenant-1"]["wanted"], rows["tenant-1"]["version"], rows["tenant-1"]["state"]) == (True, 2, None)
    for wrong in ({".": 1}, {"": 1}, {"a\nb": 1}):
        with pytest.raises(asyncpg.PostgresError, match="key"):
            await become(wrong)
    assert await sql.fetchval("select count(*) from penstock.standing_jobs where wanted") == 2


async def test_reconcile_makes_the_set_equal_in_one_transaction(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    async with Workers(app):
        assert await pool.reconcile({"a": 1, "b": 2, "c": 3}) == (3, 0, 0)
        await eventually(lambda: runs.now == {"a", "b", "c"})
        assert await pool.reconcile({"b": 2, "c": 4, "d": 5}) == (1, 1, 1)
        assert await pool.reconcile({"b": 2, "c": 4, "d": 5}) == (0, 0, 0)
        await eventually(lambda: runs.now == {"b", "c", "d"} and runs.data["c"] == 4)
        assert runs.starts == {"a": 1, "b": 1, "c": 2, "d": 1}
        results = await asyncio.gather(*[pool.reconcile({"x": n}) for n in range(4)])
        await eventually(lambda: runs.now == {"x"})
        assert sum(started for started, _, _ in results) == 1


async def test_messages_reach_the_run_wherever_it_is(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    await pool.start("acme")
    await pool.notify("acme", "before it runs")
    async with Workers(app):
        await eventually(lambda: runs.messages == [("acme", "before it runs")])
        await pool.notify("acme", {"n": 2})
        await eventually(lambda: runs.messages[1:] == [("acme", {"n": 2})])
    with pytest.raises(NotFound):
        await pool.notify("nobody", 1)


async def test_a_run_that_fails_is_started_again_later(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    tries = 0

    @pool.standing
    async def run(job: Standing[Any]) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("not yet")
        await asyncio.Event().wait()

    async with Workers(app):
        await pool.start("acme")
        await eventually(lambda: tries == 2)
        error = await sql.fetchval("select error ->> 'message' from penstock.standing_jobs")
        assert error == "not yet"


async def test_a_context_manager_is_a_handler_too(app: Penstock, pool: Pool[Any]) -> None:
    entered: list[str] = []

    @pool.standing
    @asynccontextmanager
    async def run(job: Standing[Any]) -> AsyncIterator[None]:
        entered.append(job.key)
        yield
        entered.append(f"not {job.key}")

    async with Workers(app):
        await pool.start("acme")
        await eventually(lambda: entered == ["acme"])
    assert entered == ["acme", "not acme"]


# -- the races


async def test_a_stop_and_start_at_once_end_with_one_run(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    async with Workers(app) as working:
        await working.add()
        for _ in range(10):
            await asyncio.gather(pool.start("acme"), pool.stop("acme"))
        await pool.start("acme")
        await eventually(lambda: runs.now == {"acme"})
        await pool.stop("acme")
        await eventually(lambda: runs.now == set())
    assert runs.most["acme"] == 1


async def test_it_is_not_lost_when_its_worker_dies_and_others_clean_up_at_once(url: str, sql: Sql) -> None:
    settings = Settings(heartbeat_interval=timedelta(seconds=0.4), dead_after=timedelta(seconds=1.5))
    async with Penstock(url, settings=settings) as app:
        pool = app.pool("tenants", slots=16)
        runs = Runs().on(pool)
        async with Workers(app) as working:
            await working.add()
            await working.add()
            await pool.reconcile({f"t{n}": n for n in range(12)})
            await eventually(lambda: len(runs.now) == 12)
            _, task = working.workers.pop(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert len(runs.now) < 12, "it had none"
            await eventually(lambda: len(runs.now) == 12, "all again")
            rows = await sql.fetch("select key, running_by from penstock.standing_jobs")
            assert {row["running_by"] for row in rows} <= {member.id for member in await pool.workers()}
        assert set(runs.most.values()) == {1}


async def test_a_member_that_is_cut_off_stops_its_runs_before_others_start_them(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(heartbeat_interval=timedelta(seconds=0.4), dead_after=timedelta(seconds=2))
    runs = Runs()
    async with Penstock(url, settings=settings) as first, Penstock(url, settings=settings) as second:
        pools = [app.pool("tenants", slots=8) for app in (first, second)]
        for pool in pools:
            runs.on(pool)
        async with Workers(second):
            await pools[0].reconcile({f"t{n}": n for n in range(8)})
            await eventually(lambda: len(runs.now) == 8, "their start at the one that is there")
            async with Workers(first):
                await eventually(lambda: len(runs.now) == 8 and sum(runs.starts.values()) > 8, "a move to the other")
                before = sum(runs.starts.values())

                def unreachable() -> Any:
                    raise OSError("cut off")

                database = await first.database()
                monkeypatch.setattr(database, "_acquire", unreachable)
                # The heartbeat beside the loop has a connection of its own.
                beside = heartbeat.of(database, first.settings)
                monkeypatch.setattr(beside, "_beat", lambda _: unreachable())
                await eventually(lambda: sum(runs.starts.values()) > before, "the start of its jobs elsewhere")
                await eventually(lambda: len(runs.now) == 8)
                monkeypatch.undo()
                await eventually(lambda: len(runs.now) == 8)
    assert set(runs.most.values()) == {1}, "two at once"


async def test_a_start_under_an_old_epoch_or_version_is_refused(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    await pool.declare()
    await sql.execute("select penstock.join_group('tenants', 'm', gen_random_uuid())")
    await sql.execute("update penstock.slots set target = 'm', owner = 'm', epoch = 7")
    await pool.start("acme")
    slot = pool.slot_of("acme")
    begin = "select count(*) from penstock.begin_standing('tenants', 'acme', $1, $2, $3, $4)"
    assert await sql.fetchval(begin, "m", slot, 6, 1) == 0
    assert await sql.fetchval(begin, "n", slot, 7, 1) == 0
    assert await sql.fetchval(begin, "m", slot, 7, 2) == 0
    assert await sql.fetchval(begin, "m", slot, 7, 1) == 1
    assert await sql.fetchval(begin, "m", slot, 7, 1) == 0, "a second run"
    assert not await sql.fetchval("select penstock.end_standing('tenants', 'acme', 'm', 6)")
    assert await sql.fetchval("select penstock.end_standing('tenants', 'acme', 'm', 7)")


async def test_a_message_that_comes_while_it_starts_is_not_lost(app: Penstock, pool: Pool[Any]) -> None:
    begun, go_on, got = asyncio.Event(), asyncio.Event(), []

    async def listen(job: Standing[Any]) -> None:
        async for message in job.messages():
            got.append(message)

    @pool.standing
    async def start_slowly(job: Standing[Any]) -> AsyncIterator[None]:
        begun.set()
        await go_on.wait()
        listening = asyncio.create_task(listen(job))
        yield
        listening.cancel()

    async with Workers(app):
        await pool.start("acme")
        await begun.wait()
        await pool.notify("acme", "early")
        await eventually_none(app, "select count(*) from penstock.standing_messages")
        go_on.set()
        await eventually(lambda: got == ["early"])


async def eventually_none(app: Penstock, query: str) -> None:
    database = await app.database()
    async with asyncio.timeout(30):
        while await database.fetchval(query):
            await asyncio.sleep(0.01)


async def test_who_reads_slowly_gets_all_messages_in_order(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    read, got = asyncio.Event(), []

    @pool.standing
    async def run(job: Standing[Any]) -> None:
        await read.wait()
        async for message in job.messages():
            got.append(message)

    fill = """
        insert into penstock.standing_messages (name, key, data, sent_at)
        select 'tenants', 'acme', to_jsonb(n), now() from generate_series(1, $1::integer) as n
    """
    await pool.start("acme")
    await sql.execute(fill, 2_500)
    async with Workers(app):
        database = await app.database()
        async with asyncio.timeout(30):
            while await database.fetchval("select count(*) from penstock.standing_messages") > 1_500:
                await asyncio.sleep(0.01)
        # What it has not read waits where it is safe.
        assert await database.fetchval("select count(*) from penstock.standing_messages") == 1_500
        read.set()
        await eventually(lambda: len(got) == 2_500)
    assert got == list(range(1, 2_501))
    await sql.execute(fill, 10_000)
    with pytest.raises(Conflict, match="wait already"):
        await pool.notify("acme", 1)


async def test_a_begin_whose_answer_was_lost_does_not_block_the_key(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    runs = Runs().on(pool)
    async with Workers(app):
        await pool.start("other")
        await eventually(lambda: runs.now == {"other"})
        # The state after a begin whose answer was lost, or after an end that was not written.
        async with sql.transaction():
            await pool_start(sql, "acme")
            await sql.execute("""
                update penstock.standing_jobs as standing
                set running_by = slots.owner, running_epoch = slots.epoch
                from penstock.slots
                where standing.key = 'acme' and slots.group_name = 'tenants' and slots.slot = standing.slot
            """)
        await eventually(lambda: runs.now == {"acme", "other"})
    assert runs.starts == {"acme": 1, "other": 1}


async def pool_start(sql: Sql, key: str) -> None:
    await sql.execute("select penstock.start_standing('tenants', $1)", key)


async def test_a_key_that_comes_back_waits_for_the_run_that_still_ends(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    runs, ending, may_end = Runs(), asyncio.Event(), asyncio.Event()

    @pool.standing
    async def run(job: Standing[Any]) -> AsyncIterator[None]:
        runs.begin(job)
        try:
            yield
        finally:
            ending.set()
            # However often it is cancelled.
            while not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await may_end.wait()
            runs.running[job.key] -= 1

    async with Workers(app):
        await pool.reconcile({"acme": 0})
        await eventually(lambda: runs.now == {"acme"})
        # Lost and taken again between two heartbeats.
        await sql.execute("update penstock.slots set epoch = epoch + 1 where group_name = 'tenants'")
        await sql.execute("update penstock.standing_jobs set running_by = null, running_epoch = null")
        await sql.execute("select penstock.tell_member('tenants', id) from penstock.members")
        await ending.wait()
        await pool.start("other")
        await eventually(lambda: "other" in runs.now)
        assert runs.starts["acme"] == 1
        may_end.set()
        await eventually(lambda: runs.starts["acme"] == 2)
    assert runs.most["acme"] == 1


async def held_up(sql: Sql) -> set[tuple[int, datetime]]:
    """The calls that wait for the lock 7, each by its connection and the time at which it began."""
    rows = await sql.fetch("""
        select activity.pid, activity.query_start
        from pg_locks
        join pg_stat_activity as activity using (pid)
        where locktype = 'advisory' and objid = 7 and not granted and activity.datname = current_database()
    """)
    return {(row["pid"], row["query_start"]) for row in rows}


async def hold_up(sql: Sql, when: str) -> None:
    """Let changes of standing jobs wait for the lock 7, which this connection has."""
    await sql.execute(
        "create function hold_up() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock_shared(7); return new; end $$;"
        "create trigger hold_up before update on penstock.standing_jobs for each row"
        f" when ({when}) execute function hold_up();"
        "select pg_advisory_lock(7)"
    )


BEGIN = "old.running_by is null and new.running_by is not null"
END = "old.running_by is not null and new.running_by is null"
NONE_LEFT = "select count(*) = 0 from penstock.standing_jobs"
SOON = Settings(handover_grace=timedelta(milliseconds=50))


async def test_a_run_that_is_lost_while_its_begin_waits_for_the_database_runs_again(
    app: Penstock, pool: Pool[Any], sql: Sql
) -> None:
    runs = Runs().on(pool)
    await pool.declare()
    await hold_up(sql, BEGIN)
    async with Workers(app):
        await pool.start("acme")
        first = await eventually(lambda: held_up(sql), "the begin to wait")
        # Lost and taken again between two heartbeats.
        await sql.execute("update penstock.slots set epoch = epoch + 1 where group_name = 'tenants'")
        await sql.execute("select penstock.tell_member('tenants', id) from penstock.members")

        async def another() -> bool:
            now = await held_up(sql)
            return bool(now) and not now & first

        await eventually(another, "the begin under the next epoch to wait")
        await sql.execute("select pg_advisory_unlock(7)")
        await eventually(lambda: runs.now == {"acme"}, "the run")
        (job,) = await pool.standing_jobs()
        assert (job.running_by, job.failures, job.error) == (job.owner, 0, None)
    assert (runs.starts, runs.most) == ({"acme": 1}, {"acme": 1})


async def test_a_run_that_is_cancelled_while_its_begin_waits_for_the_database_starts_where_its_slot_moves(
    url: str, sql: Sql
) -> None:
    async with Penstock(url, settings=SOON) as app:
        pool = app.pool("tenants", slots=16)
        runs = Runs().on(pool)
        await pool.declare()
        await hold_up(sql, BEGIN)
        async with Workers(app) as workers:
            await pool.start("acme")
            await eventually(lambda: held_up(sql), "the begin to wait")
            (first,) = {slot.owner for slot in await pool.slots()}
            assert first is not None
            await workers.add()
            # All slots of the first move, that of the begin among them.
            await pool.drain(first)

            async def moved() -> bool:
                return first not in {slot.owner for slot in await pool.slots()}

            await eventually(moved, "the slots to have moved")
            await sql.execute("select pg_advisory_unlock(7)")
            await eventually(lambda: runs.now == {"acme"}, "the run")
            (job,) = await pool.standing_jobs()
            assert job.running_by == job.owner != first
        assert (runs.starts, runs.most) == ({"acme": 1}, {"acme": 1})


async def test_a_run_whose_end_waits_for_the_database_longer_than_its_grace_ends(url: str, sql: Sql) -> None:
    async with Penstock(url, settings=SOON) as app:
        pool = app.pool("tenants", slots=16)
        runs = Runs().on(pool)
        await pool.declare()
        await hold_up(sql, END)
        async with Workers(app):
            await pool.start("acme")
            await eventually(lambda: runs.now == {"acme"}, "the run")
            await pool.stop("acme")
            first = await eventually(lambda: held_up(sql), "the end to wait")

            async def cancelled() -> bool:
                return not await held_up(sql) & first

            await eventually(cancelled, "the end of the call, since the time to stop is over")
            await sql.execute("select pg_advisory_unlock(7)")
            await eventually(lambda: sql.fetchval(NONE_LEFT), "the end of the run, which is not wanted", 20)
        assert (runs.now, runs.starts) == (set(), {"acme": 1})


async def test_a_run_whose_begin_was_not_heard_before_it_was_stopped_ends(
    url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def begin_without_answer(*given: Any) -> Any:
        answer = await begin(*given)
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()
        return answer

    begin = queries.begin_standing
    monkeypatch.setattr(queries, "begin_standing", begin_without_answer)
    async with Penstock(url, settings=SOON) as app:
        pool = app.pool("tenants", slots=16)
        runs = Runs().on(pool)
        async with Workers(app):
            await pool.start("acme")
            await begun.wait()
            assert await pool.stop("acme")
            await eventually(lambda: sql.fetchval(NONE_LEFT), "the end of the run, which is not wanted", 20)
            await pool.start("acme")
            await eventually(lambda: runs.now == {"acme"}, "the run")
    assert (runs.starts, runs.most) == ({"acme": 1}, {"acme": 1})


async def test_a_stop_side_that_hangs_is_cancelled_after_its_time(url: str, sql: Sql) -> None:
    soon = timedelta(milliseconds=50)
    async with Penstock(url, settings=Settings(handover_grace=soon, shutdown_grace=soon)) as app:
        pool = app.pool("tenants", slots=4)
        runs = Runs()

        @pool.standing
        async def run(job: Standing[Any]) -> AsyncIterator[None]:
            runs.begin(job)
            yield
            try:
                await asyncio.Event().wait()
            finally:
                runs.running[job.key] -= 1

        async with Workers(app):
            await pool.start("acme")
            await eventually(lambda: runs.now == {"acme"})
            await pool.stop("acme")
            await eventually_none(app, "select count(*) from penstock.standing_jobs")
            assert runs.now == set()
            await pool.start("acme")
            await eventually(lambda: runs.now == {"acme"})


async def test_a_state_that_is_no_json_is_an_error_of_the_run(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    runs = Runs()

    @pool.standing
    async def run(job: Standing[Any]) -> AsyncIterator[None]:
        runs.begin(job)
        if runs.starts[job.key] == 1:
            job.state = {"at": object()}
            raise ValueError("at first")
        yield
        runs.running[job.key] -= 1

    async with Workers(app):
        await pool.start("acme")
        failed = "select count(*) from penstock.standing_jobs where failures = 0 and running_by is null"
        await eventually(lambda: runs.starts["acme"] == 1)
        await eventually_none(app, failed)
        assert await sql.fetchval("select error ->> 'type' from penstock.standing_jobs") == "ValueError"
        await sql.execute("update penstock.standing_jobs set retry_at = null")
        await eventually(lambda: runs.starts["acme"] == 2, "the next run")


async def test_standing_jobs_move_when_the_pool_grows(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    keys = {f"t{n}" for n in range(20)}
    async with Workers(app) as working:
        await working.add()
        await pool.reconcile(dict.fromkeys(keys, 0))
        await eventually(lambda: runs.now == keys)
        await pool.resize(64)
        await eventually(lambda: sum(runs.starts.values()) > 20, "a move")
        await eventually(lambda: runs.now == keys)
    assert set(runs.most.values()) == {1}


async def test_a_second_handler_is_refused(pool: Pool[Any]) -> None:
    Runs().on(pool)
    with pytest.raises(InvalidInput, match="already"):
        Runs().on(pool)


async def test_start_waits_for_the_start_side_and_says_how_it_failed(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    @pool.standing
    async def run(job: Standing[Any]) -> AsyncIterator[None]:
        if job.data == "broken":
            raise ValueError("no such host")
        if job.data == "slow":
            await connected.wait()
        yield

    connected = asyncio.Event()
    with pytest.raises(TimeoutError):
        await pool.start("acme", "fine", timeout=timedelta(milliseconds=50))
    async with Workers(app):
        assert await pool.start("acme", "fine", timeout=timedelta(seconds=30)) == "unchanged"
        assert await pool.start("bolt", "fine", timeout=timedelta(seconds=30)) == "started"
        with pytest.raises(JobFailed, match="standing job cargo of pool tenants failed: ValueError: no such host"):
            await pool.start("cargo", "broken", timeout=timedelta(seconds=30))
        assert await pool.start("cargo", "fine", replace=True, timeout=timedelta(seconds=30)) == "replaced"
        # A worker runs it, and its start side has not ended.
        await pool.start("dock", "slow")
        begun = "select running_by is not null from penstock.standing_jobs where key = 'dock'"
        await eventually(lambda: sql.fetchval(begun), "the beginning of the start side")
        with pytest.raises(TimeoutError):
            await pool.start("dock", "slow", timeout=timedelta(milliseconds=50))
        connected.set()
        assert await pool.start("dock", "slow", timeout=timedelta(seconds=30)) == "unchanged"


async def lose(sql: Sql, tried: dict[str, int | None]) -> dict[str, tuple[int, bool]]:
    """A worker is lost while it runs these, on trial with so many; returns the crashes, and whether they are quarantined."""
    for key, with_others in tried.items():
        await sql.execute(
            "update penstock.standing_jobs set running_by = 'm', running_epoch = 1, started_at = now(), tried_with = $2"
            " where key = $1", key, with_others,
        )  # fmt: skip
    await sql.execute("select penstock.end_slots('tenants', 'm', null, '{}')")
    rows = await sql.fetch("select key, crashes, quarantined_at, running_by from penstock.standing_jobs")
    assert {row["running_by"] for row in rows} == {None}
    return {row["key"]: (row["crashes"], row["quarantined_at"] is not None) for row in rows}


async def test_only_what_ends_its_workers_alone_is_set_aside(pool: Pool[Any], sql: Sql) -> None:
    for key in ("a", "b", "c"):
        await pool.start(key)
    assert await lose(sql, {"a": None, "b": None}) == {"a": (1, False), "b": (1, False), "c": (0, False)}
    # Only standing jobs on trial get the blame.
    assert await lose(sql, {"a": 2, "b": 2, "c": None}) == {"a": (2, False), "b": (2, False), "c": (0, False)}
    # Alone on trial, but it may have been a job beside it: once more.
    assert await lose(sql, {"a": 1}) == {"a": (3, False), "b": (2, False), "c": (0, False)}
    assert await lose(sql, {"a": 1, "c": None}) == {"a": (4, True), "b": (2, False), "c": (0, False)}
    assert await sql.fetchval("select error ->> 'type' from penstock.standing_jobs where key = 'a'") == "Quarantined"
    # Slots that move are no crash.
    await sql.execute("update penstock.standing_jobs set running_by = 'm' where key = 'b'")
    await sql.execute("select penstock.end_slots('tenants', 'm', array[slot], '{}') from penstock.standing_jobs where key = 'b'")
    assert await sql.fetchval("select crashes from penstock.standing_jobs where key = 'b'") == 2
    # Crashes that lie far apart are no series.
    await sql.execute(
        "update penstock.standing_jobs set running_by = 'm', started_at = now() - interval '11 minutes' where key = 'b'"
    )
    assert (await lose(sql, {}))["b"] == (1, False)
    # Reconciling leaves it alone; starting it frees it.
    assert await pool.reconcile({"a": {}, "b": {}, "c": {}}) == (0, 0, 0)
    assert await pool.start("a") == "starting"
    row = await sql.fetchrow("select crashes, quarantined_at, error from penstock.standing_jobs where key = 'a'")
    assert tuple(row) == (0, None, None)


async def test_suspects_start_one_by_one_and_more_as_they_survive(
    app: Penstock, pool: Pool[Any], sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "FIRST_S", 0.2)
    runs = Runs().on(pool)
    keys = {f"t{n}" for n in range(7)}
    await pool.reconcile(dict.fromkeys({*keys, "fresh"}, 0))
    await sql.execute("update penstock.standing_jobs set crashes = 2 where key <> 'fresh'")
    await sql.execute(
        """
        create table public.trials (tried_with integer, call xid8);
        create function begun() returns trigger language plpgsql as
            $$ begin insert into public.trials values (new.tried_with, pg_current_xact_id()); return null; end $$;
        create trigger begun after update on penstock.standing_jobs
            for each row when (old.running_by is null and new.running_by is not null) execute function begun();
        """
    )
    async with Workers(app):
        await eventually(lambda: runs.now == {*keys, "fresh"}, "all runs")
        acquitted = "select count(*) = 0 from penstock.standing_jobs where tried_with is not null"
        await eventually(lambda: sql.fetchval(acquitted), "the end of the last trial")
    begun = [row["tried_with"] for row in await sql.fetch("select tried_with from public.trials where tried_with is not null")]
    assert sorted(begun) == [1, 2, 2, 4, 4, 4, 4]
    assert await sql.fetchval("select count(*) from public.trials where tried_with is null") == 1
