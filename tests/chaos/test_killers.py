"""Jobs that crash or wedge their worker are quarantined, and no other job fails because of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock import JobRecord, Penstock, Status
from tests.chaos.restarted import Fleet
from tests.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture
async def fleet(url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(url, tmp_path / "history.jsonl")
    yield fleet
    fleet.stop()


async def _declared(app: Penstock, name: str) -> bool:
    """A worker declares its types one by one."""
    return name in {record.name for record in await app.job_types()}


async def _ended(app: Penstock, ids: list[Any], timeout: float = 90.0) -> dict[str, JobRecord]:
    async def over() -> bool:
        return all(count.ready + count.deferred + count.in_progress == 0 for count in await app.counts())

    await eventually(over, "the end of all jobs", timeout=timeout)
    return {str(id): record for id in ids if (record := await app.find(id)) is not None}


async def _reasons(app: Penstock) -> dict[str, str | None]:
    rows = await (await app.database()).fetch("select id, reason from penstock.archived_jobs")
    return {str(row["id"]): row["reason"] for row in rows}


@pytest.mark.soak
@pytest.mark.parametrize(("name", "workers"), [("plain", 1), ("single", 3)])
async def test_a_job_that_ends_its_worker_is_quarantined_and_no_other_is_condemned(
    url: str, fleet: Fleet, name: str, workers: int
) -> None:
    async with Penstock(url) as app:
        fleet.start(workers, name)
        await eventually(lambda: _declared(app, name), "the declaration")
        killers = {0}
        payloads = [
            {"n": n, "does": "exit" if n in killers else None, "sleep_s": 0.02 if n in killers else 0.01 * (n % 3)}
            for n in range(300)
        ]
        ids = [receipt.id for receipt in await app.enqueue_many(name, payloads)]
        records = await _ended(app, ids)
        reasons, starts = await _reasons(app), fleet.starts()
        failed = {record.data["n"] for record in records.values() if record.status is Status.FAILED}
        assert failed == killers
        assert {record.status for record in records.values()} == {Status.SUCCEEDED, Status.FAILED}
        for id, record in records.items():
            if record.data["n"] in killers:
                assert reasons[id] == "quarantined"
                assert record.errors[-1]["type"] == "Quarantined"
                assert [error["attempt"] for error in record.errors] == [1, 2, 3]
                assert starts[id] <= 3
            assert starts[id] >= 1
        # It crashed its worker three times at most; a crash while a second killer runs in the same worker counts for both.
        assert fleet.deaths <= 3 * len(killers)


@pytest.mark.soak
async def test_among_2000_jobs_only_those_that_end_their_workers_fail(url: str, fleet: Fleet) -> None:
    ends = {200: "exit", 900: "kill", 1600: "segfault"}
    async with Penstock(url) as app:
        fleet.start(3, "plain")
        await eventually(lambda: _declared(app, "plain"), "the declaration")
        payloads = [{"n": n, "does": ends.get(n), "sleep_s": 0.005 * (n % 3)} for n in range(2000)]
        ids = [receipt.id for receipt in await app.enqueue_many("plain", payloads)]
        records, starts = await _ended(app, ids, timeout=200), fleet.starts()
        assert sorted(record.data["n"] for record in records.values() if record.status is Status.FAILED) == sorted(ends)
        assert Counter(record.status for record in records.values()) == {Status.SUCCEEDED: 1997, Status.FAILED: 3}
        assert list((await _reasons(app)).values()).count("quarantined") == 3
        assert all(starts[id] >= 1 for id in records)


@pytest.mark.soak
async def test_a_suspect_runs_with_nothing_beside_it(url: str, fleet: Fleet) -> None:
    async with Penstock(url) as app:
        fleet.start(2, "plain")
        await eventually(lambda: _declared(app, "plain"), "the declaration")
        payloads = [{"n": n, "does": "exit" if n == 0 else None, "sleep_s": 0.1} for n in range(60)]
        ids = [receipt.id for receipt in await app.enqueue_many("plain", payloads)]
        records = await _ended(app, ids)
        assert [record.data["n"] for record in records.values() if record.status is Status.FAILED] == [0]
        # A job that runs for the third time runs alone: no other job of its process runs between its start and its end.
        open_in: dict[int, set[str]] = {}
        alone: dict[int, str] = {}
        for event in sorted(fleet.events(), key=lambda event: event["at"]):
            running = open_in.setdefault(event["pid"], set())
            if event["kind"] == "started":
                assert event["pid"] not in alone, f"{event} started beside {alone[event['pid']]}"
                if event["attempt"] >= 3:
                    assert not running, f"{event} runs beside {running}"
                    alone[event["pid"]] = event["id"]
                running.add(event["id"])
            else:
                running.discard(event["id"])
                if alone.get(event["pid"]) == event["id"]:
                    del alone[event["pid"]]


async def test_a_key_keeps_its_order_and_is_held_while_its_suspect_runs_alone(url: str, fleet: Fleet) -> None:
    async with Penstock(url) as app:
        fleet.start(2, "keyed")
        await eventually(lambda: _declared(app, "keyed"), "the declaration")
        pool = app.pool("keyed", slots=8, max_attempts=3)
        jobs = [
            (f"k{key}", {"n": n, "does": "exit" if (key, n) == (3, 4) else None, "sleep_s": 0.005})
            for n in range(10)
            for key in range(12)
        ]
        ids = [receipt.id for receipt in await pool.enqueue_many(jobs)]
        records = await _ended(app, ids)
        failed = [(record.key, record.data["n"]) for record in records.values() if record.status is Status.FAILED]
        assert failed == [("k3", 4)]
        last: dict[str, int] = {}
        for event in sorted(fleet.events(), key=lambda event: event["at"]):
            if event["kind"] == "ended":
                # Jobs that had run and were not settled when their worker ended run once more from there.
                again = event["attempt"] > 1
                assert again or event["n"] >= last.get(event["key"], -1), f"{event} after {last[event['key']]}"
                last[event["key"]] = event["n"]
        first_of_5 = min(event["at"] for event in fleet.events() if event["key"] == "k3" and event["n"] == 5)
        last_of_4 = max(event["at"] for event in fleet.events() if event["key"] == "k3" and event["n"] == 4)
        assert first_of_5 > last_of_4


@pytest.mark.parametrize("does", ["exit", pytest.param("kill", marks=pytest.mark.soak)])
async def test_a_job_that_may_start_once_and_never_started_is_not_failed(
    url: str, fleet: Fleet, sql: asyncpg.Connection[Any], does: str
) -> None:
    """A mark that is under way while its process dies counts as a start, since no process can know. All failed jobs that never
    started were therefore marked, in the last call of the process, which has no more jobs than the process has places.
    """
    await sql.execute(
        """
        create table public.marks (job uuid, call xid8);
        create function marked() returns trigger language plpgsql as
            $$ begin insert into public.marks values (new.id, pg_current_xact_id()); return null; end $$;
        """
    )
    async with Penstock(url) as app:
        await app.migrate()
        await sql.execute(
            "create trigger marked after update of begun on penstock.queued_jobs"
            " for each row when (new.begun and not old.begun) execute function marked()"
        )
        fleet.start(1, "once")
        await eventually(lambda: _declared(app, "once"), "the declaration")
        payloads = [{"n": n, "does": does if n == 200 else None, "sleep_s": 0.01} for n in range(600)]
        ids = [receipt.id for receipt in await app.enqueue_many("once", payloads)]
        records = await _ended(app, ids)
        starts = fleet.starts()
        assert max(starts.values()) == 1
        failed = {id for id, record in records.items() if record.status is Status.FAILED}
        calls = {str(row["job"]): row["call"] for row in await sql.fetch("select job, call from public.marks")}
        assert failed, "the job that ends its worker has not failed"
        assert failed <= calls.keys()
        # Beside them, those fail that had started: they ran, or their results were not written yet.
        never_started = failed - starts.keys()
        assert len({calls[id] for id in never_started}) <= 1
        assert len(never_started) <= 20


@pytest.mark.soak
async def test_a_handler_that_wedges_its_worker_is_quarantined_and_no_other_is_condemned(url: str, fleet: Fleet) -> None:
    async with Penstock(url) as app:
        fleet.start(2, "wedged")
        await eventually(lambda: _declared(app, "wedged"), "the declaration")
        payloads = [{"n": n, "does": "block" if n == 0 else None, "sleep_s": 0.02} for n in range(80)]
        ids = [receipt.id for receipt in await app.enqueue_many("wedged", payloads)]

        # A wedged worker stays wedged. A supervisor kills it some time after other workers have taken over its jobs.
        async def restart() -> None:
            while True:
                await asyncio.sleep(0.5)
                for row in await (await app.database()).fetch(
                    "select pid from penstock.workers where blocked_since < penstock.clock() - interval '6 seconds'"
                ):
                    with suppress(ProcessLookupError):
                        os.kill(row["pid"], signal.SIGKILL)

        restarting = asyncio.create_task(restart())
        try:
            records = await _ended(app, ids, timeout=120)
        finally:
            restarting.cancel()
        assert [record.data["n"] for record in records.values() if record.status is Status.FAILED] == [0]
        assert list((await _reasons(app)).values()).count("quarantined") == 1


async def test_a_child_process_that_dies_costs_its_own_job_an_attempt_and_nothing_else(url: str, fleet: Fleet) -> None:
    async with Penstock(url) as app:
        fleet.start(1, "child")
        await eventually(lambda: _declared(app, "child"), "the declaration")
        ids = [r.id for r in await app.enqueue_many("child", [{"n": n, "does": "exit" if n == 3 else None} for n in range(12)])]
        records = await _ended(app, ids)
        assert [record.data["n"] for record in records.values() if record.status is Status.FAILED] == [3]
        assert [error["attempt"] for record in records.values() for error in record.errors] == [1, 2]
        assert fleet.deaths == 0
