"""Jobs that crash or wedge their worker are quarantined, and no other job fails because of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import JobRecord, Penstock, Status
from penstock.testing import TemporaryDatabases
from tests.chaos.restarted import Fleet
from tests.chaos.sabotage import Edit, Sabotage
from tests.chaos.seeking import found_out
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

MOST_LOSSES = 12
SABOTAGES = {
    # All that were on trial when a worker was lost count the loss, as if each had been alone.
    "guilt by presence": Sabotage(
        r"job [0-9]+ ends no worker, and is failed", (Edit("end_lost", r"if p_speaks and size = 1 then", "if p_speaks then"),)
    ),
    # What a worker has claimed counts as started.
    "no mark of the start": Sabotage(
        r"job [0-9]+ failed, and was never begun", (Edit("end_attempts", r"and not locked\.begun", "and false"),)
    ),
    # The second loss condemns a job, whatever ran beside it.
    "one more loss": Sabotage(
        r"job [0-9]+ ends no worker, and is failed",
        (
            Edit(
                "end_attempts",
                r"locked\.outcome = 'lost-alone' and coalesce\(locked\.lone_crashes, 0\) \+ 1 >= type\.max_crashes",
                "locked.outcome in ('lost', 'lost-alone') and locked.crashes >= 1",
            ),
        ),
    ),
    # A worker runs a suspect without waiting until its other jobs have ended.
    "suspects are not alone": Sabotage(r"the suspect [0-9]+ started beside [0-9]+ others", worker="suspects_beside_others"),
    # A suspect leaves the key queue, whose other jobs go on.
    "a key is not held": Sabotage(
        r"k3/[0-9]+ started before the last start of the suspect",
        (Edit("end_attempts", r"when next\.crashes = 2 and not given\.blocks then null", "when next.crashes = 2 then null"),),
    ),
    # The end of one child ends the others of its worker.
    "children that end together": Sabotage(r"job [0-9]+ ends no process, and has ", worker="children_that_end_together"),
}


@pytest.fixture
async def fleet(url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(url, tmp_path / "history.jsonl")
    yield fleet
    fleet.stop()


async def is_found_out(
    databases: TemporaryDatabases, folder: Path, sabotage: Sabotage, run: Callable[[str, Fleet, Sql], Awaitable[list[str]]]
) -> None:
    """Check that a run with a guarantee removed shows it; each run has a database and a fleet of its own."""

    async def one(own: Path) -> list[str]:
        with databases.database() as url:
            fleet, sql = Fleet(url, own / "history.jsonl"), await asyncpg.connect(url)
            try:
                return await run(url, fleet, sql)
            finally:
                fleet.stop()
                sql.terminate()

    await found_out(sabotage.expected, folder, one)


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


async def _run_beside_a_killer(app: Penstock, fleet: Fleet, name: str, workers: int) -> list[str]:
    """Run 300 jobs, the first of which ends its workers, and return what is wrong: it alone fails, after few runs."""
    fleet.start(workers, name)
    await eventually(lambda: _declared(app, name), "the declaration")
    payloads = [{"n": n, "does": None if n else "exit", "sleep_s": 0.01 * (n % 3) if n else 0.02} for n in range(300)]
    ids = [receipt.id for receipt in await app.enqueue_many(name, payloads)]
    records = await _ended(app, ids)
    reasons, starts = await _reasons(app), fleet.starts()
    found = []
    for id, record in records.items():
        status = str(record.status)
        if not starts[id]:
            found.append(f"job {record.data['n']} is {status}, and was never started")
        if record.data["n"]:
            if record.status is not Status.SUCCEEDED:
                found.append(f"job {record.data['n']} ends no worker, and is {status}")
            continue
        if record.status is not Status.FAILED or reasons[id] != "quarantined" or record.errors[-1]["type"] != "Quarantined":
            found.append(f"the killer is {status} with the reason {reasons[id]} after {record.errors}")
        # Twice beside others, then in halves and quarters until it is alone, and three times alone.
        attempts = [error["attempt"] for error in record.errors]
        if attempts != list(range(1, len(attempts) + 1)) or not 5 <= len(attempts) <= MOST_LOSSES or starts[id] > len(attempts):
            found.append(f"the killer was started {starts[id]} times, and has the errors {record.errors}")
    if fleet.deaths > MOST_LOSSES:
        found.append(f"{fleet.deaths} workers have ended")
    return found


@pytest.mark.soak
@pytest.mark.parametrize(("name", "workers"), [("plain", 1), ("single", 3)])
async def test_a_job_that_ends_its_worker_is_quarantined_and_no_other_is_condemned(
    url: str, fleet: Fleet, name: str, workers: int
) -> None:
    async with Penstock(url) as app:
        assert await _run_beside_a_killer(app, fleet, name, workers) == []


@pytest.mark.soak
async def test_guilt_by_presence_is_found_out(databases: TemporaryDatabases, tmp_path: Path) -> None:
    sabotage = SABOTAGES["guilt by presence"]

    async def run(url: str, fleet: Fleet, sql: Sql) -> list[str]:
        async with Penstock(url) as app:
            await sabotage.prepare(app)
            return await _run_beside_a_killer(app, fleet, "plain", 1)

    await is_found_out(databases, tmp_path, sabotage, run)


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


async def _run_suspects(url: str, fleet: Fleet, sabotage: str = "") -> list[str]:
    """Run jobs, the first of which ends its workers, with others waiting behind it, and return what is wrong: it runs alone."""
    async with Penstock(url) as app:
        fleet.start(2, "plain", sabotage=sabotage)
        await eventually(lambda: _declared(app, "plain"), "the declaration")
        first = [{"n": n, "does": None if n else "exit", "sleep_s": 0.1 if n else 0.05} for n in range(60)]
        ids = [receipt.id for receipt in await app.enqueue_many("plain", first)]
        killer = ids[0]

        async def over() -> bool:
            """Whether the killer has ended, or never will, since it is not alone.

            Until then other jobs wait behind it, which could run beside a suspect.
            """
            if sum([count.ready for count in await app.counts()]) < 100:
                more = [{"n": n, "does": None, "sleep_s": 0.4} for n in range(len(ids), len(ids) + 100)]
                ids.extend(receipt.id for receipt in await app.enqueue_many("plain", more))
            return (await app.find(killer)).status.finished or fleet.deaths > MOST_LOSSES

        await eventually(over, "the end of the job that ends its workers", timeout=120)
        records = {} if fleet.deaths > MOST_LOSSES else await _ended(app, ids)
    failed = [record.data["n"] for record in records.values() if record.status is Status.FAILED]
    found = [] if failed == [0] else [f"these jobs have failed: {failed}"]
    # A job that runs for the third time runs beside suspects at most: no other job of its process runs meanwhile.
    open_in: dict[int, set[str]] = {}
    tried: dict[int, set[str]] = {}
    events = sorted(fleet.events(), key=lambda event: event["at"])
    first_alone = min(event["at"] for event in events if event["attempt"] >= 3)
    assert any(event["at"] > first_alone and event["attempt"] == 1 for event in events), "no other job waited"
    for event in events:
        running, suspects = open_in.setdefault(event["pid"], set()), tried.setdefault(event["pid"], set())
        if event["kind"] == "started":
            if event["attempt"] >= 3:
                if running:
                    found.append(f"the suspect {event['n']} started beside {len(running)} others")
                suspects.add(event["id"])
            else:
                if suspects:
                    found.append(f"job {event['n']} started beside {len(suspects)} suspects")
                running.add(event["id"])
        else:
            running.discard(event["id"])
            suspects.discard(event["id"])
    return found


@pytest.mark.soak
async def test_a_suspect_runs_with_nothing_beside_it(url: str, fleet: Fleet) -> None:
    assert await _run_suspects(url, fleet) == []


@pytest.mark.soak
async def test_suspects_that_run_beside_others_are_found_out(databases: TemporaryDatabases, tmp_path: Path) -> None:
    sabotage = SABOTAGES["suspects are not alone"]
    await is_found_out(databases, tmp_path, sabotage, lambda url, fleet, sql: _run_suspects(url, fleet, sabotage.worker))


async def _run_keys_beside_a_killer(url: str, fleet: Fleet, sql: Sql, sabotage: Sabotage | None = None) -> list[str]:
    """Run jobs of twelve keys, the fifth of one of which ends its workers, and return what is wrong.

    No suspect runs before jobs behind it could: jobs of its key and of others come when it is a suspect, and the others run.
    """
    killer = ("k3", 4)
    async with Penstock(url) as app:
        if sabotage is not None:
            await sabotage.prepare(app)
        await sql.execute("select pg_advisory_lock(hashtext('penstock.isolate'))")
        fleet.start(2, "keyed")
        await eventually(lambda: _declared(app, "keyed"), "the declaration")
        pool = app.pool("keyed", slots=8, max_attempts=3)

        def job(key: str, n: int) -> tuple[str, dict[str, Any]]:
            return key, {"n": n, "does": "exit" if (key, n) == killer else None, "sleep_s": 0.005}

        first = [job(f"k{key}", n) for n in range(10) for key in range(12) if key != 3 or n < 5]
        ids = [receipt.id for receipt in await pool.enqueue_many(first)]
        suspect = "select crashes = 2 and status = 'queued' from penstock.queued_jobs where id = $1"
        id = ids[first.index(job(*killer))]
        await eventually(lambda: sql.fetchval(suspect, id), "that the job which ends its workers is a suspect")
        # Of the slot of the suspect: a claim that takes a job of one of these keys has come past the key of the suspect.
        probes = {key for n in range(60) if pool.slot_of(key := f"p{n}") == pool.slot_of("k3")}
        assert probes, "no other key is in the slot of the suspect"
        behind = [job("k3", n) for n in range(5, 10)] + [job(key, 0) for key in sorted(probes)]
        ids += [receipt.id for receipt in await pool.enqueue_many(behind)]

        def probed() -> bool:
            return probes <= {event["key"] for event in fleet.events() if event["kind"] == "ended"}

        await eventually(probed, "the jobs of the other keys")
        await sql.execute("select pg_advisory_unlock(hashtext('penstock.isolate'))")
        records = await _ended(app, ids)
    found = []
    failed = [(record.key, record.data["n"]) for record in records.values() if record.status is Status.FAILED]
    if failed != [killer]:
        found.append(f"these jobs have failed: {failed}")
    events = sorted(fleet.events(), key=lambda event: event["at"])
    last: dict[str, int] = {}
    for event in events:
        if event["kind"] == "ended":
            # Jobs that had run and were not settled when their worker ended run once more from there.
            if event["attempt"] == 1 and event["n"] < last.get(event["key"], -1):
                found.append(f"{event} after {last[event['key']]}")
            last[event["key"]] = event["n"]
    of_killer = [event["at"] for event in events if (event["key"], event["n"]) == killer]
    for event in events:
        if event["key"] == "k3" and event["n"] > killer[1] and event["at"] < of_killer[-1]:
            found.append(f"{event['key']}/{event['n']} {event['kind']} before the last start of the suspect in front of it")
    return found


async def test_a_key_keeps_its_order_and_is_held_while_its_suspect_runs_alone(url: str, fleet: Fleet, sql: Sql) -> None:
    assert await _run_keys_beside_a_killer(url, fleet, sql) == []


@pytest.mark.soak
async def test_a_key_that_goes_on_past_its_suspect_is_found_out(databases: TemporaryDatabases, tmp_path: Path) -> None:
    sabotage = SABOTAGES["a key is not held"]
    await is_found_out(
        databases, tmp_path, sabotage, lambda url, fleet, sql: _run_keys_beside_a_killer(url, fleet, sql, sabotage)
    )


async def _run_once(url: str, fleet: Fleet, sql: Sql, does: str, sabotage: Sabotage | None = None) -> list[str]:
    """Run 600 jobs that may start once, one of which ends its worker, and return what is wrong."""
    await sql.execute(
        """
        create table public.marks (job uuid, call xid8);
        create function marked() returns trigger language plpgsql as
            $$ begin insert into public.marks values (new.id, pg_current_xact_id()); return null; end $$;
        """
    )
    async with Penstock(url) as app:
        await app.migrate()
        if sabotage is not None:
            await sabotage.prepare(app)
        await sql.execute(
            "create trigger marked after update of begun on penstock.queued_jobs"
            " for each row when (new.begun and not old.begun) execute function marked()"
        )
        fleet.start(1, "once")
        await eventually(lambda: _declared(app, "once"), "the declaration")
        payloads = [{"n": n, "does": does if n == 200 else None, "sleep_s": 0.01} for n in range(600)]
        ids = [receipt.id for receipt in await app.enqueue_many("once", payloads)]
        records = await _ended(app, ids)
        calls = {str(row["job"]): row["call"] for row in await sql.fetch("select job, call from public.marks")}
    return _condemned(records, fleet.starts(), calls)


def _condemned(records: Mapping[str, JobRecord], starts: Counter[str], calls: Mapping[str, Any]) -> list[str]:
    found = [f"job {records[id].data['n']} was started {times} times" for id, times in starts.items() if times > 1]
    failed = {id for id, record in records.items() if record.status is Status.FAILED}
    if not failed:
        found.append("the job that ends its worker has not failed")
    found += [f"job {records[id].data['n']} failed, and was never begun" for id in failed - calls.keys()]
    # Beside them, those fail that had started: they ran, or their results were not written yet.
    never_started = failed - starts.keys()
    of_calls = {calls[id] for id in never_started & calls.keys()}
    if len(of_calls) > 1 or len(never_started & calls.keys()) > 20:
        found.append(f"{len(never_started)} jobs of {len(of_calls)} calls failed, and were never started")
    return found


@pytest.mark.parametrize("does", ["exit", pytest.param("kill", marks=pytest.mark.soak)])
async def test_a_job_that_may_start_once_and_never_started_is_not_failed(url: str, fleet: Fleet, sql: Sql, does: str) -> None:
    """A mark that is under way while its process dies counts as a start, since no process can know. All failed jobs that never
    started were therefore marked, in the last call of the process, which has no more jobs than the process has places.
    """
    assert await _run_once(url, fleet, sql, does) == []


@pytest.mark.soak
async def test_a_claim_that_counts_as_a_start_is_found_out(databases: TemporaryDatabases, tmp_path: Path) -> None:
    sabotage = SABOTAGES["no mark of the start"]
    await is_found_out(databases, tmp_path, sabotage, lambda url, fleet, sql: _run_once(url, fleet, sql, "kill", sabotage))


async def _run_beside_a_wedger(url: str, fleet: Fleet, sabotage: Sabotage | None = None) -> list[str]:
    """Run 80 jobs, the first of which blocks the loop of its worker for ever, and return what is wrong."""
    async with Penstock(url) as app:
        if sabotage is not None:
            await sabotage.prepare(app)
        fleet.start(2, "wedged")
        await eventually(lambda: _declared(app, "wedged"), "the declaration")
        payloads = [{"n": n, "does": "block" if n == 0 else None, "sleep_s": 0.1 if n else 0.02} for n in range(80)]
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
        reasons = await _reasons(app)
    found = [
        f"job {record.data['n']} ends no worker, and is {record.status}"
        for record in records.values()
        if record.data["n"] and record.status is not Status.SUCCEEDED
    ]
    killer = records[str(ids[0])]
    if killer.status is not Status.FAILED or reasons[str(ids[0])] != "quarantined":
        found.append(f"the job that wedges its worker is {killer.status} with the reason {reasons[str(ids[0])]}")
    return found


@pytest.mark.soak
async def test_a_handler_that_wedges_its_worker_is_quarantined_and_no_other_is_condemned(url: str, fleet: Fleet) -> None:
    assert await _run_beside_a_wedger(url, fleet) == []


@pytest.mark.soak
async def test_jobs_that_are_condemned_beside_a_wedger_are_found_out(databases: TemporaryDatabases, tmp_path: Path) -> None:
    sabotage = SABOTAGES["one more loss"]
    await is_found_out(databases, tmp_path, sabotage, lambda url, fleet, sql: _run_beside_a_wedger(url, fleet, sabotage))


async def _run_children(url: str, fleet: Fleet, sabotage: str = "") -> list[str]:
    """Run twelve jobs in child processes, one of which ends its process, and return what is wrong."""
    async with Penstock(url) as app:
        fleet.start(1, "child", sabotage=sabotage)
        await eventually(lambda: _declared(app, "child"), "the declaration")
        payloads = [{"n": n, "does": "exit" if n == 3 else None, "sleep_s": 0.2 if n == 3 else 0.5} for n in range(12)]
        records = await _ended(app, [receipt.id for receipt in await app.enqueue_many("child", payloads)])
    found = []
    for record in records.values():
        attempts = [error["attempt"] for error in record.errors]
        if record.data["n"] == 3 and (record.status is not Status.FAILED or attempts != [1, 2]):
            found.append(f"the job that ends its process is {record.status} after {record.errors}")
        if record.data["n"] != 3 and (record.status is not Status.SUCCEEDED or attempts):
            found.append(f"job {record.data['n']} ends no process, and has {record.errors}")
    if fleet.deaths:
        found.append(f"{fleet.deaths} workers have ended")
    return found


async def test_a_child_process_that_dies_costs_its_own_job_an_attempt_and_nothing_else(url: str, fleet: Fleet) -> None:
    assert await _run_children(url, fleet) == []


@pytest.mark.soak
async def test_children_that_end_together_are_found_out(databases: TemporaryDatabases, tmp_path: Path) -> None:
    sabotage = SABOTAGES["children that end together"]
    await is_found_out(databases, tmp_path, sabotage, lambda url, fleet, sql: _run_children(url, fleet, sabotage.worker))
