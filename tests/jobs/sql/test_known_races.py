"""The races that an earlier system of this kind had, each as the sequence of calls that would bring it about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import asyncpg
import pytest

Sql: TypeAlias = "asyncpg.Connection[Any]"
SESSIONS = {name: f"00000000-0000-0000-0000-00000000000{n}" for n, name in enumerate(("m1", "m2"), start=1)}


class Group:
    """Two members of the pool work, with one slot, driven by hand."""

    def __init__(self, sql: Sql) -> None:
        self.sql = sql

    async def give(self, slot: int, member: str) -> None:
        """Let a member have a slot, which is free, or becomes free in an orderly way."""
        await self.sql.execute("update penstock.slots set target = $2, placed = true where slot = $1", slot, member)
        owner, epoch = await self.sql.fetchrow("select owner, epoch from penstock.slots where slot = $1", slot)
        if owner is not None:
            await self.sql.fetch("select penstock.release('work', $1, $2, $3)", owner, [slot], [epoch])
        await self.take(slot, member)

    async def take(self, slot: int, member: str) -> bool:
        return bool(await self.sql.fetch("select * from penstock.take('work', $1, $2, $3)", member, SESSIONS[member], [slot]))

    async def epoch(self, slot: int = 0) -> int:
        return int(await self.sql.fetchval("select epoch from penstock.slots where slot = $1", slot))

    async def claim(self, member: str, epoch: int, limit: int = 10) -> list[asyncpg.Record]:
        rows = await self.sql.fetch(
            "select * from penstock.claim_keys($1, 'work', '{0}', array[$2::bigint], $3)", member, epoch, limit
        )
        return [row for row in rows if row["id"] is not None]

    async def settle(self, job: asyncpg.Record, outcome: str = "succeeded") -> str:
        rows = await self.sql.fetch(
            "select * from penstock.settle($1, $2, $3, $4)", [job["id"]], [job["attempt"]], [job["lease"]], [outcome]
        )
        return str(rows[0]["outcome"]) if rows else "succeeded"

    async def begin(self, member: str, epoch: int, version: int = 1, slot: int = 0) -> bool:
        call = "select * from penstock.begin_standing('work', 'acme', $1, $2, $3, $4)"
        return bool(await self.sql.fetch(call, member, slot, epoch, version))

    async def end(self, member: str, epoch: int) -> bool:
        return bool(await self.sql.fetchval("select penstock.end_standing('work', 'acme', $1, $2, '{\"by\": 1}')", member, epoch))

    async def running(self) -> tuple[str | None, str | None] | None:
        row = await self.sql.fetchrow("select running_by, state from penstock.standing_jobs where key = 'acme'")
        return None if row is None else (row["running_by"], row["state"])


@pytest.fixture
async def group(sql: Sql) -> AsyncIterator[Group]:
    await sql.execute("select penstock.declare_pool('work', '{\"slots\": 1}', '{\"backoff_base\": \"1 hour\"}')")
    for member, session in SESSIONS.items():
        await sql.execute("select penstock.join_group('work', $1, $2)", member, session)
    group = Group(sql)
    await group.give(0, "m1")
    yield group


async def enqueue(sql: Sql, *numbers: int) -> None:
    for n in numbers:
        await sql.execute("select penstock.enqueue('work', $1::text::jsonb, p_key => 'acme')", str(n))


async def jobs(sql: Sql) -> list[tuple[int, str]]:
    rows = await sql.fetch(
        "select data::int as n, status::text from penstock.queued_jobs union all"
        " select data::int, status::text from penstock.archived_jobs order by 1"
    )
    return [(row["n"], row["status"]) for row in rows]


async def test_a_job_is_not_lost_when_it_is_put_back_while_its_key_moves(group: Group, sql: Sql) -> None:
    await enqueue(sql, 1, 2)
    (first,) = await group.claim("m1", 1)
    # Its owner hands the slot over before the result is written, and the result comes too late.
    await group.give(0, "m2")
    assert await group.settle(first, "released") == "stale"
    (again,) = await group.claim("m2", 2)
    assert (again["id"], again["attempt"]) == (first["id"], first["attempt"] + 1)
    assert await group.settle(again) == "succeeded"
    assert [job["data"] for job in await group.claim("m2", 2)] == ["2"]
    assert await jobs(sql) == [(1, "succeeded"), (2, "in-progress")]


async def test_nothing_is_lost_or_doubled_when_several_clean_up_at_once(group: Group, sql: Sql, url: str) -> None:
    await enqueue(sql, 1, 2)
    (job,) = await group.claim("m1", 1)
    await sql.execute("select penstock.start_standing('work', 'acme', '{}')")
    assert await group.begin("m1", 1)
    await sql.execute("update penstock.members set seen_at = seen_at - interval '1 minute', dead_after = '1 s' where id = 'm1'")
    assert await sql.fetchval("select penstock.evict('work')") == []
    await sql.execute("update penstock.members set dead_after = '0.001 s' where id = 'm1'")
    others = [await asyncpg.connect(url) for _ in range(6)]

    async def settle(connection: Sql) -> None:
        await connection.fetch("select * from penstock.settle($1, $2, $3)", [job["id"]], [job["attempt"]], [job["lease"]])

    evicted = await asyncio.gather(
        *[connection.fetchval("select penstock.evict('work')") for connection in others[:5]], settle(others[5])
    )
    for connection in others:
        await connection.close()
    assert [ids for ids in evicted[:5] if ids] == [["m1"]]
    assert await group.running() == (None, None)
    # Either the result came first, or the job is there for the next owner; never both, never neither.
    found = await jobs(sql)
    assert [n for n, _ in found] == [1, 2]
    await group.give(0, "m2")
    claimed = await group.claim("m2", await group.epoch())
    assert [row["data"] for row in claimed] == (["2"] if found[0][1] == "succeeded" else ["1"])
    assert await sql.fetchval("select count(*) from penstock.leases where worker = 'm1'") == 0


async def test_a_stale_view_starts_no_second_run(group: Group, sql: Sql, url: str) -> None:
    await sql.execute("select penstock.start_standing('work', 'acme', '{}')")
    await group.give(0, "m2")
    # m1 still thinks that the slot is its own.
    assert not await group.begin("m1", 1)
    others = [await asyncpg.connect(url) for _ in range(5)]
    begun = await asyncio.gather(*[Group(connection).begin("m2", 2) for connection in others])
    for connection in others:
        await connection.close()
    assert begun.count(True) == 1
    assert (await group.running() or ("", ""))[0] == "m2"


async def test_a_run_never_outlives_the_ownership_under_which_it_began(group: Group, sql: Sql) -> None:
    await sql.execute("select penstock.start_standing('work', 'acme', '{}')")
    assert await group.begin("m1", 1)
    # Ownership moves, however rudely: with it goes the run, in one transaction.
    await group.give(0, "m2")
    assert await group.running() == (None, None)
    assert not await sql.fetchval("select penstock.save_standing('work', 'acme', 'm1', 1, '{\"by\": \"m1\"}')")
    assert not await group.end("m1", 1)
    assert await group.begin("m2", 2)
    assert not await group.end("m1", 1)
    assert await group.running() == ("m2", None)


async def test_a_stop_reaches_the_worker_that_runs_it_also_while_the_key_moves(group: Group, sql: Sql, url: str) -> None:
    await sql.execute("select penstock.start_standing('work', 'acme', '{}')")
    assert await group.begin("m1", 1)
    # Growing the pool takes the key to another slot, which goes to m2; the run is still m1's.
    slots = 2
    while await sql.fetchval("select penstock.slot_of('acme', $1)", slots) == 0:
        slots += 1
    await sql.execute("select penstock.resize_pool('work', $1)", slots)
    slot = await sql.fetchval("select slot from penstock.standing_jobs where key = 'acme'")
    await sql.execute("update penstock.slots set target = 'm2', placed = true where slot = $1", slot)
    assert not await group.take(slot, "m2"), "the slot cannot be taken while the run goes on elsewhere"
    heard: asyncio.Queue[str] = asyncio.Queue()
    listener = await asyncpg.connect(url)
    await listener.add_listener("penstock_m1", lambda *words: heard.put_nowait(words[3]))
    assert await sql.fetchval("select penstock.stop_standing('work', 'acme')")
    assert await asyncio.wait_for(heard.get(), 20) == "standing work"
    await listener.close()
    assert (await group.running() or ("", ""))[0] == "m1", "it stays known until it has stopped"
    assert await group.end("m1", 1)
    assert await group.running() is None
    assert await group.take(slot, "m2")


@pytest.mark.parametrize("end", ["cancelled", "expired", "failed for good", "worker gone", "released"])
async def test_no_end_of_the_first_job_leaves_its_key_blocked(group: Group, sql: Sql, end: str) -> None:
    await enqueue(sql, 1, 2)
    member, epoch = "m1", 1
    (first,) = await group.claim("m1", 1)
    if end in ("cancelled", "expired"):
        # It waits an hour for its retry, and its key with it.
        assert await group.settle(first, "failed") == "retried"
        assert await group.claim("m1", 1) == []
        if end == "cancelled":
            await sql.execute("select penstock.cancel($1)", first["id"])
        else:
            await sql.execute(
                "update penstock.queued_jobs set expires_at = now() - interval '1 second' where id = $1", first["id"]
            )
    elif end == "failed for good":
        assert await group.settle(first, "failed-for-good") == "failed"
    elif end == "released":
        assert await group.settle(first, "released") == "released"
        (first,) = await group.claim("m1", 1)
        assert await group.settle(first) == "succeeded"
    else:
        await sql.execute("select penstock.leave_group('work', 'm1')")
        await group.give(0, "m2")
        member, epoch = "m2", 2
        (first,) = await group.claim(member, epoch)
        assert await group.settle(first) == "succeeded"
    assert [job["data"] for job in await group.claim(member, epoch)] == ["2"]


async def test_a_start_that_timed_out_does_not_start_later(group: Group, sql: Sql) -> None:
    await sql.execute("select penstock.start_standing('work', 'acme', '{}')")
    # The call of m1 is stuck somewhere. Meanwhile the key is stopped, started with another payload, and moves.
    await sql.execute("select penstock.stop_standing('work', 'acme')")
    assert not await group.begin("m1", 1)
    await sql.execute("select penstock.start_standing('work', 'acme', '{\"n\": 1}')")
    await sql.execute("select penstock.start_standing('work', 'acme', '{\"n\": 2}', true)")
    assert not await group.begin("m1", 1, version=1)
    await group.give(0, "m2")
    assert await group.begin("m2", 2, version=2)
    assert not await group.begin("m1", 1, version=2)
    assert (await group.running() or ("", ""))[0] == "m2"
