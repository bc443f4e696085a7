"""What a loss costs: recovery after a restart of PostgreSQL, starts of what was lost, and standing jobs whose key moves."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock import Penstock
from penstock.postgres.embedded import EmbeddedServer
from tests.waiting import eventually

Sql = Any


async def _recover_at(sql: Sql, moment: str) -> int:
    """What `recover` does at a moment, an expression of a worker's row."""
    async with sql.transaction():
        at = await sql.fetchval(f"select ({moment})::text from penstock.workers where id = 'w'")
        await sql.execute("select set_config('penstock.clock', $1, true)", at)
        return int(await sql.fetchval("select penstock.recover()"))


async def _evict_at(sql: Sql, moment: str) -> list[str]:
    """Whom `evict` removes from the pool at a moment, an expression of its member's row."""
    async with sql.transaction():
        at = await sql.fetchval(f"select ({moment})::text from penstock.members")
        await sql.execute("select set_config('penstock.clock', $1, true)", at)
        return list(await sql.fetchval("select penstock.evict('pool')"))


@pytest.mark.chaos
async def test_a_restart_of_postgres_does_not_start_the_silence_of_a_dead_worker_again(tmp_path: Path) -> None:
    """Half of the silence after the first look is its time to say that it lives, and at least the whole of it in all."""
    server = EmbeddedServer(tmp_path / "server")
    url = await asyncio.to_thread(server.start)
    try:
        app = Penstock(url)
        await app.migrate()
        await app.close()
        sql = await asyncpg.connect(url)
        await sql.execute("select penstock.create_job_type('work')")
        await sql.execute("select penstock.enqueue('work')")
        await sql.execute("select penstock.register_worker('w', '{work}', p_dead_after => interval '60 seconds')")
        await sql.execute("select penstock.claim('w', '{work}', 1)")
        await sql.execute("select penstock.declare_pool('pool', '{\"slots\": 1}')")
        await sql.execute("select penstock.join_group('pool', 'm', gen_random_uuid(), '60 seconds')")
        # Suspected already before the restart, long enough to be taken for dead after it, which does not count.
        for table in ("workers", "members"):
            await sql.execute(
                f"update penstock.{table}"
                " set seen_at = seen_at - interval '50 seconds', suspected_at = seen_at - interval '5 seconds'"
            )
        started_at = await sql.fetchval("select pg_postmaster_start_time()")
        os.kill(int((tmp_path / "server/postgres/postmaster.pid").read_text().split()[0]), signal.SIGKILL)
        sql.terminate()

        async def back() -> Any:
            with suppress(asyncpg.PostgresError, OSError):
                return await asyncpg.connect(url, timeout=5)

        sql = await eventually(back, "the server", timeout=60)
        assert await sql.fetchval("select pg_postmaster_start_time()") > started_at
        assert await _recover_at(sql, "seen_at + dead_after + interval '20 seconds'") == 0
        assert await _recover_at(sql, "suspected_at + dead_after * 0.5 - interval '0.1 seconds'") == 0
        assert await _recover_at(sql, "suspected_at + dead_after * 0.5 + interval '0.1 seconds'") == 1
        assert await _evict_at(sql, "seen_at + dead_after + interval '20 seconds'") == []
        assert await _evict_at(sql, "suspected_at + dead_after * 0.5 - interval '0.1 seconds'") == []
        assert await _evict_at(sql, "suspected_at + dead_after * 0.5 + interval '0.1 seconds'") == ["m"]
        await sql.close()
    finally:
        await asyncio.to_thread(server.stop)


async def test_workers_that_could_not_reach_the_database_are_not_declared_dead_by_the_first_that_can(url: str, sql: Sql) -> None:
    """The state after a recovery of PostgreSQL that took longer than workers may be silent, or after a freeze of its machine."""
    async with Penstock(url) as app:
        await app.migrate()
    await sql.execute("select penstock.create_job_type('once', '{\"delivery_strategy\": \"at_most_once\"}')")
    await sql.execute("select penstock.enqueue('once')")
    await sql.execute("select penstock.register_worker('w', '{once}'), penstock.register_worker('other', '{once}')")
    await sql.execute("select penstock.claim('w', '{once}', 1)")
    away = "seen_at + interval '1 minute'"
    assert await _recover_at(sql, away) == 0
    # Its heartbeat arrives in time: it keeps its jobs.
    await sql.execute("update penstock.workers set seen_at = suspected_at + dead_after * 0.4 where id = 'w'")
    assert await _recover_at(sql, "seen_at + dead_after * 0.2") == 0
    # Then it falls silent: a new suspicion, and half of the silence after it the end.
    assert await _recover_at(sql, "seen_at + dead_after * 0.7") == 0
    assert await _recover_at(sql, "seen_at + dead_after * 1.1") == 0
    assert await _recover_at(sql, "seen_at + dead_after * 1.3") == 1


async def test_a_member_that_could_not_reach_the_database_is_not_evicted_by_the_first_who_can(url: str, sql: Sql) -> None:
    async with Penstock(url) as app:
        await app.migrate()
    await sql.execute("select penstock.declare_pool('pool', '{\"slots\": 1}')")
    session = await sql.fetchval("select gen_random_uuid()")
    await sql.execute("select penstock.join_group('pool', 'm', $1)", session)

    assert await _evict_at(sql, "seen_at + interval '1 minute'") == []
    await sql.execute("update penstock.members set seen_at = suspected_at + dead_after * 0.4")
    assert await _evict_at(sql, "seen_at + dead_after * 0.2") == []
    assert await _evict_at(sql, "seen_at + dead_after * 0.7") == []
    assert await _evict_at(sql, "seen_at + dead_after * 1.1") == []
    assert await _evict_at(sql, "seen_at + dead_after * 1.3") == ["m"]


async def test_a_job_that_may_start_once_and_was_lost_is_not_begun_by_who_lost_it(url: str, sql: Sql) -> None:
    """As a worker finds it that was stopped between its claim and the start."""
    async with Penstock(url) as app:
        await app.migrate()
    await sql.execute("select penstock.create_job_type('once', '{\"delivery_strategy\": \"at_most_once\"}')")
    ids = [await sql.fetchval("select penstock.enqueue('once')") for _ in range(2)]
    await sql.execute("select penstock.register_worker('w', '{once}'), penstock.promise_to_begin('w')")
    lost = await sql.fetch("select id, lease from penstock.claim('w', '{once}', 10)")
    assert {row["id"] for row in lost} == set(ids)
    begin = "select * from penstock.begin_jobs($1, $2::bigint[])"
    assert [row[0] for row in await sql.fetch(begin, [ids[0]], [lost[0]["lease"]])] == [ids[0]]
    assert await _recover_at(sql, "seen_at + dead_after") == 0
    assert await _recover_at(sql, "seen_at + dead_after * 2") == 2
    # The one that was begun is failed; the other was never started, and is as it was.
    assert await sql.fetchval("select status::text from penstock.archived_jobs where id = $1", ids[0]) == "failed"
    assert await sql.fetch(begin, ids, [row["lease"] for row in lost]) == []
    again = await sql.fetch("select id, lease, attempt from penstock.claim('x', '{once}', 10)")
    assert [(row["id"], row["attempt"]) for row in again] == [(ids[1], 1)]
    assert await sql.fetch(begin, ids, [row["lease"] for row in lost]) == []
    assert [row[0] for row in await sql.fetch(begin, [ids[1]], [again[0]["lease"]])] == [ids[1]]


async def test_a_standing_job_that_starts_while_its_key_moves_is_told_to_who_takes_the_key(url: str, sql: Sql) -> None:
    """The taker looks after it took the slot and before the start is committed: only the notification can tell it."""
    async with Penstock(url) as app:
        await app.migrate()
    await sql.execute("select penstock.declare_pool('pool', '{\"slots\": 1}')")
    for member in ("old", "new"):
        await sql.execute("select penstock.join_group('pool', $1, gen_random_uuid())", member)
    await sql.execute("update penstock.slots set owner = 'old', target = 'new' where group_name = 'pool'")
    heard: list[str] = []
    await sql.add_listener("penstock_new", lambda *notification: heard.append(notification[3]))
    other = await asyncpg.connect(url)
    try:
        async with other.transaction():
            assert await other.fetchval("select penstock.start_standing('pool', 'key')") == "starting"
            await sql.execute("update penstock.slots set owner = 'new' where group_name = 'pool'")
            assert await sql.fetchval("select count(*) from penstock.standing_jobs") == 0
            heard.clear()
        await eventually(lambda: heard == ["standing pool"], "the notification of the new owner")
    finally:
        other.terminate()
