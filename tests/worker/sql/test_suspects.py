"""Which job the loss of a worker counts for: only the one that it ran alone, and only when the loss says something (P2, P9)."""

from __future__ import annotations

import json
import random
from typing import Any
from uuid import UUID

import pytest

from penstock import Penstock

Sql = Any
JOBS = 40


class Fleet:
    """Workers as the database sees them: they claim a trial if there is one, and ordinary jobs if not."""

    def __init__(self, sql: Sql, names: str = "{work}") -> None:
        self._sql = sql
        self._names = names
        self._started = 0

    async def start(self, host: str | None = None, supervisor: str | None = None, pid: int = 0) -> str:
        """Register a worker, on a machine of its own unless one is named, that has lived for a minute."""
        self._started += 1
        worker = f"host.1.{self._started:06x}"
        await self._sql.execute("select penstock.promise_to_begin($1)", worker)
        await self._sql.execute(
            "select penstock.register_worker($1, $2::text::text[], $3, $4, p_supervisor => $5)",
            worker, self._names, host or worker, pid, supervisor,
        )  # fmt: skip
        await self._sql.execute("update penstock.workers set started_at = started_at - interval '1 minute' where id = $1", worker)
        return worker

    async def claim(self, worker: str, limit: int = 1_000) -> dict[UUID, tuple[int, int]]:
        """The jobs that a worker gets, with their attempts and leases."""
        rows = await self._sql.fetch("select * from penstock.claim_alone($1, $2::text::text[])", worker, self._names)
        if not rows:
            rows = await self._sql.fetch("select * from penstock.claim($1, $2::text::text[], $3)", worker, self._names, limit)
        return {row["id"]: (row["attempt"], row["lease"]) for row in rows}

    async def settle(self, jobs: dict[UUID, tuple[int, int]]) -> None:
        """Settle jobs as succeeded."""
        attempts, leases = [attempt for attempt, _ in jobs.values()], [lease for _, lease in jobs.values()]
        await self._sql.fetch("select * from penstock.settle($1, $2::smallint[], $3::bigint[])", list(jobs), attempts, leases)

    async def pass_minutes(self) -> None:
        """Let some minutes pass since the last losses."""
        await self._sql.execute(
            "update penstock.lost_workers set first_at = first_at - interval '5 minutes',"
            " last_at = last_at - interval '5 minutes', lost_at = lost_at - interval '5 minutes'"
        )

    async def lose(self, *workers: str) -> None:
        """Let workers be silent since one moment, minutes after the last loss, until they are dead, and recover their jobs."""
        await self.pass_minutes()
        await self._sql.execute(
            "update penstock.workers set seen_at = clock_timestamp() - dead_after * 1.2, state = 'dead' where id = any ($1)",
            workers,
        )
        await self._sql.fetch("select penstock.recover()")


@pytest.fixture
async def fleet(url: str, sql: Sql) -> Fleet:
    async with Penstock(url) as app:
        await app.migrate()
    await sql.execute("select penstock.create_job_type('work', '{\"max_attempts\": 2}')")
    return Fleet(sql)


async def enqueued(sql: Sql, jobs: int = JOBS) -> list[UUID]:
    return [row["id"] for row in await sql.fetch("select penstock.enqueue('work') as id from generate_series(1, $1)", jobs)]


async def ends(sql: Sql) -> dict[UUID, tuple[str, str | None]]:
    return {
        row["id"]: (row["status"], row["reason"])
        for row in await sql.fetch("select id, status::text, reason from penstock.archived_jobs")
    }


async def suspicions(sql: Sql) -> list[tuple[int, int | None]]:
    return [tuple(row) for row in await sql.fetch("select crashes, lone_crashes from penstock.queued_jobs order by 1, 2")]


@pytest.mark.parametrize("max_crashes", [1, 2, 3])
async def test_a_job_that_ends_its_workers_is_convicted_after_max_crashes_alone_and_none_beside_it(
    fleet: Fleet, sql: Sql, max_crashes: int
) -> None:
    await sql.execute("select penstock.change_job_type('work', jsonb_build_object('max_crashes', $1::integer))", max_crashes)
    ids = await enqueued(sql)
    killer = random.choice(ids)
    alone = losses = 0
    while killer not in await ends(sql):
        assert losses < 30, "it is not found"
        # Three workers share what there is; the one that gets the killer is lost with what it has.
        for worker in [await fleet.start() for _ in range(3)]:
            got = await fleet.claim(worker, JOBS // 2)
            if killer in got:
                alone += len(got) == 1
                losses += 1
                await fleet.lose(worker)
            else:
                await fleet.settle(got)
    while rest := await fleet.claim(await fleet.start()):
        await fleet.settle(rest)
    ended = await ends(sql)
    assert alone == max_crashes
    assert ended.pop(killer) == ("failed", "quarantined")
    assert ended == {id: ("succeeded", None) for id in ids if id != killer}
    assert losses <= 2 + 3 + max_crashes, "the suspects are not divided"
    (errors,) = await sql.fetchrow("select errors from penstock.archived_jobs where id = $1", killer)
    assert json.loads(errors)[-1]["type"] == "Quarantined"


async def test_workers_that_are_killed_together_again_and_again_convict_no_job(fleet: Fleet, sql: Sql) -> None:
    """As by deploys that kill hard: the suspects of each end up alone, and none of them has done it."""
    ids = await enqueued(sql, 12)
    for _ in range(30):
        workers = [await fleet.start() for _ in range(4)]
        for worker in workers:
            await fleet.claim(worker, 3)
        await fleet.lose(*workers)
    assert await ends(sql) == {}
    assert max(lone or 0 for _, lone in await suspicions(sql)) <= 1
    while rest := await fleet.claim(await fleet.start()):
        await fleet.settle(rest)
    assert await ends(sql) == dict.fromkeys(ids, ("succeeded", None))


async def test_innocents_of_lost_workers_are_tried_side_by_side(fleet: Fleet, sql: Sql) -> None:
    await enqueued(sql, 150)
    for _ in range(2):
        workers = [await fleet.start() for _ in range(3)]
        for worker in workers:
            assert len(await fleet.claim(worker, 50)) == 50
        # One after the other, so that two are there when the jobs of the first are divided.
        for worker in workers:
            await fleet.lose(worker)
    worker, trials = await fleet.start(), 0
    while got := await fleet.claim(worker):
        await fleet.settle(got)
        trials += 1
    assert {status for status, _ in (await ends(sql)).values()} == {"succeeded"}
    assert len(await ends(sql)) == 150
    assert trials <= 9


@pytest.mark.parametrize("node", ["supervisor", "host"])
async def test_a_node_that_vanished_makes_no_suspects(fleet: Fleet, sql: Sql, node: str) -> None:
    await enqueued(sql, 4)
    for _ in range(5):
        workers = [
            await fleet.start(host="spot" if node == "host" else None, supervisor="sup" if node != "host" else None)
            for _ in range(2)
        ]
        for worker in workers:
            assert len(await fleet.claim(worker, 2)) == 2
        await fleet.lose(*workers)
    assert await suspicions(sql) == [(0, None)] * 4


async def test_a_process_that_is_lost_beside_one_of_its_supervisor_that_lives_counts(fleet: Fleet, sql: Sql) -> None:
    await enqueued(sql, 2)
    await fleet.start(supervisor="sup")
    await fleet.claim(lost := await fleet.start(supervisor="sup"))
    await fleet.lose(lost)
    assert await suspicions(sql) == [(1, None)] * 2


async def test_what_its_supervisor_says_of_the_end_of_a_process_counts_at_once(fleet: Fleet, sql: Sql) -> None:
    await sql.execute("select penstock.change_job_type('work', '{\"max_crashes\": 2}')")
    (id,) = await enqueued(sql, 1)
    for pid in range(4):
        await fleet.pass_minutes()
        assert await fleet.claim(await fleet.start(supervisor="sup", pid=pid))
        assert await sql.fetchval("select penstock.end_workers('sup', array[$1::integer], '{SIGKILL}')", pid) == 1
        assert await sql.fetchval("select penstock.end_workers('sup', array[$1::integer], '{SIGKILL}')", pid) == 0
    assert await ends(sql) == {id: ("failed", "quarantined")}
    message = await sql.fetchval("select errors -> -1 ->> 'message' from penstock.archived_jobs")
    assert "2 worker(s) were lost while they ran nothing but this job" in message
    assert "SIGKILL" in message


async def test_processes_that_their_supervisor_sees_end_together_excuse_each_other(fleet: Fleet, sql: Sql) -> None:
    await enqueued(sql, 1)
    for _ in range(8):
        await fleet.pass_minutes()
        await fleet.claim(await fleet.start(supervisor="sup", pid=1))
        await fleet.start(supervisor="sup", pid=2)
        assert await sql.fetchval("select penstock.end_workers('sup', '{1, 2}', '{SIGKILL, SIGKILL}')") == 2
    assert await suspicions(sql) == [(2, 1)]


async def test_a_worker_that_leaves_with_its_jobs_makes_no_suspects(fleet: Fleet, sql: Sql) -> None:
    await enqueued(sql, 2)
    for _ in range(3):
        worker = await fleet.start()
        assert len(await fleet.claim(worker)) == 2
        await sql.execute("select penstock.unregister_worker($1)", worker)
    assert await suspicions(sql) == [(0, None)] * 2


async def test_without_max_crashes_no_number_of_them_convicts(fleet: Fleet, sql: Sql) -> None:
    await sql.execute("select penstock.change_job_type('work', '{\"max_crashes\": null}')")
    await enqueued(sql, 1)
    for _ in range(12):
        worker = await fleet.start()
        assert await fleet.claim(worker)
        await fleet.lose(worker)
    assert await suspicions(sql) == [(2, 10)]


async def test_a_worker_that_comes_back_was_not_ended_by_what_it_ran_alone(fleet: Fleet, sql: Sql) -> None:
    await enqueued(sql, 1)
    for _ in range(3):
        worker = await fleet.start()
        await fleet.claim(worker)
        await fleet.lose(worker)
    assert await suspicions(sql) == [(2, 1)]
    await sql.execute("select penstock.register_worker($1, '{work}')", f"{worker}.2")
    assert await suspicions(sql) == [(2, None)]


async def test_jobs_that_crashed_alone_are_tried_one_at_a_time(fleet: Fleet, sql: Sql) -> None:
    """Two that end their workers at the same time, again and again, would otherwise excuse each other."""
    await enqueued(sql, 2)
    await sql.execute(
        "update penstock.queued_jobs set crashes = 2, lone_crashes = 1, run_after = penstock.isolation_time(), seq = null"
    )
    assert len(await fleet.claim(await fleet.start())) == 1
    assert not await fleet.claim(await fleet.start())


async def test_suspects_for_which_no_worker_is_free_go_back_as_ordinary_jobs_unless_they_are_alone(
    fleet: Fleet, sql: Sql
) -> None:
    await enqueued(sql, 5)
    for _ in range(2):
        worker = await fleet.start()
        assert len(await fleet.claim(worker)) == 5
        await fleet.lose(worker)
    await sql.execute(
        "update penstock.queued_jobs set trial = null where id = (select min(id::text)::uuid from penstock.queued_jobs)"
    )
    await sql.execute("update penstock.queued_jobs set updated_at = updated_at - interval '1 minute'")
    await sql.fetch("select penstock.recover()")
    crashes = [crashes for crashes, _ in await suspicions(sql)]
    assert crashes.count(1) >= 3
    assert 2 in crashes
