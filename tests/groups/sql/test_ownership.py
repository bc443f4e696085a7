"""The ownership protocol in SQL: who may take, keep and lose a slot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from penstock import Conflict, InvalidInput, NotFound, Penstock
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.groups.assignors import jump_hash, key_hash, slot_of
from penstock.postgres.database import Database
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
TEN_SECONDS = timedelta(seconds=10)


@pytest.fixture
async def database(app: Penstock) -> Database:
    return await app.database()


@pytest.fixture
async def group(database: Database) -> AsyncIterator[str]:
    await ownership.declare_group(database, "g", 8, "sticky")
    yield "g"


SESSIONS: dict[str, UUID] = {}


async def join(database: Database, member: str, **metadata: Any) -> None:
    SESSIONS[member] = uuid4()
    await balance.join(database, "g", member, SESSIONS[member], TEN_SECONDS, metadata, None)


async def heartbeat(database: Database, member: str) -> ownership.Beat:
    return await ownership.heartbeat(database, "g", member, SESSIONS[member])


async def take(database: Database, member: str, slots: Any) -> dict[int, int]:
    return await ownership.take(database, "g", member, SESSIONS[member], slots)


async def leave(database: Database, member: str) -> None:
    await balance.leave(database, "g", member, SESSIONS[member], None)


async def owned(database: Database, member: str) -> dict[int, int]:
    return (await heartbeat(database, member)).owned


async def settle(database: Database, *members: str) -> dict[str, dict[int, int]]:
    """Let every member release and take slots until no slot moves."""
    for _ in range(3):
        for member in members:
            beat = await heartbeat(database, member)
            await ownership.release(database, "g", member, {slot: beat.owned[slot] for slot in beat.revoked})
            await take(database, member, sorted(beat.available))
    return {member: await owned(database, member) for member in members}


async def test_a_lone_member_takes_everything_with_epoch_one(database: Database, group: str) -> None:
    await join(database, "a")
    beat = await heartbeat(database, "a")
    assert beat.available == set(range(8))
    assert beat.owned == {}
    assert await take(database, "a", range(8)) == dict.fromkeys(range(8), 1)


async def test_a_joiner_gets_its_share_only_when_it_is_released(database: Database, group: str) -> None:
    await join(database, "a")
    await settle(database, "a")
    await join(database, "b")
    assert (await heartbeat(database, "b")).available == set()
    beat = await heartbeat(database, "a")
    assert len(beat.revoked) == 4
    assert await take(database, "b", range(8)) == {}, "taken before it was released"
    moving = dict.fromkeys(beat.revoked, 1)
    await ownership.release(database, "g", "a", moving)
    assert await take(database, "b", range(8)) == dict.fromkeys(moving, 2)
    assert set(await owned(database, "a")) == set(range(8)) - set(moving)


async def test_a_leavers_slots_alone_are_dealt_out(database: Database, group: str) -> None:
    for member in "abc":
        await join(database, member)
    before = await settle(database, "a", "b", "c")
    await leave(database, "b")
    after = await settle(database, "a", "c")
    assert all(after[member].items() >= before[member].items() for member in "ac")
    assert {slot for member in "ac" for slot in after[member]} == set(range(8))
    assert all(after[member][slot] == 2 for member in "ac" for slot in after[member] if slot in before["b"])


async def test_a_join_may_be_repeated(database: Database, group: str) -> None:
    await join(database, "a")
    await balance.join(database, "g", "a", SESSIONS["a"], TEN_SECONDS, {}, None)
    assert [member.id for member in await ownership.members(database, "g")] == ["a"]


async def test_a_release_under_an_old_epoch_changes_nothing(database: Database, group: str) -> None:
    await join(database, "a")
    await settle(database, "a")
    await ownership.release(database, "g", "a", {0: 1})
    assert await take(database, "a", [0]) == {0: 2}
    await ownership.release(database, "g", "a", {0: 1})
    assert (await owned(database, "a"))[0] == 2


async def test_a_second_live_member_with_an_id_is_refused_a_silent_one_replaced(database: Database, group: str, sql: Sql) -> None:
    await join(database, "a")
    await settle(database, "a")
    with pytest.raises(Conflict, match="alive"):
        await join(database, "a")
    await sql.execute("update penstock.members set seen_at = seen_at - interval '1 minute', dead_after = '1 second'")
    await wait_for_postmaster_age(sql)
    earlier = SESSIONS["a"]
    await join(database, "a")
    assert await owned(database, "a") == {}
    # The earlier membership does not pass for the later one when it continues.
    assert not (await ownership.heartbeat(database, "g", "a", earlier)).known
    assert not await balance.leave(database, "g", "a", earlier, None)
    with pytest.raises(NotFound):
        await ownership.take(database, "g", "a", earlier, [0])


async def wait_for_postmaster_age(sql: Sql) -> None:
    while await sql.fetchval("select pg_postmaster_start_time() + interval '1.1 seconds' > clock_timestamp()"):
        await asyncio.sleep(0.05)


async def test_a_silent_member_is_evicted_and_its_slots_are_free_at_once(database: Database, group: str, sql: Sql) -> None:
    await join(database, "a")
    await join(database, "b")
    await settle(database, "a", "b")
    assert await balance.evict(database, "g", None) == []
    await sql.execute(
        "update penstock.members set seen_at = seen_at - interval '1 minute', dead_after = '1 second' where id = 'a'"
    )
    # One look is not enough.
    assert await balance.evict(database, "g", None) == []
    assert await eventually(lambda: balance.evict(database, "g", None), "the eviction") == ["a"]
    assert not (await heartbeat(database, "a")).known
    with pytest.raises(NotFound):
        await take(database, "a", [0])
    assert set((await settle(database, "b"))["b"]) == set(range(8))


async def test_a_drained_member_stays_without_slots(database: Database, group: str) -> None:
    await join(database, "a")
    await join(database, "b")
    await settle(database, "a", "b")
    await balance.drain(database, "g", "a", None)
    assert (await settle(database, "a", "b"))["a"] == {}
    await balance.drain(database, "g", "a", None, drain=False)
    assert len((await settle(database, "a", "b"))["a"]) == 4


async def test_targets_of_a_member_that_died_before_assigning_are_computed_by_another(
    database: Database, group: str, sql: Sql
) -> None:
    await join(database, "a")
    await sql.execute("select penstock.join_group('g', 'b', gen_random_uuid())")
    beat = await heartbeat(database, "a")
    assert not beat.balanced
    assert await balance.rebalance(database, "g", None) == 4
    assert (await heartbeat(database, "a")).balanced
    assert await balance.rebalance(database, "g", None) == 0


async def test_only_those_concerned_are_notified(database: Database, group: str, sql: Sql) -> None:
    for member in "ab":
        await join(database, member)
    await settle(database, "a", "b")
    heard: list[str] = []
    for member in "abcd":
        await sql.add_listener(f"penstock_{member}", lambda _c, _p, channel, payload: heard.append(f"{channel[9:]}: {payload}"))
    await join(database, "c")
    await sql.fetchval("select 1")
    assert sorted(heard) == ["a: slots g", "b: slots g"]
    heard.clear()
    beat = await heartbeat(database, "a")
    await ownership.release(database, "g", "a", {slot: beat.owned[slot] for slot in beat.revoked})
    await sql.fetchval("select 1")
    assert heard == ["c: slots g"]


async def test_concurrent_joins_and_leaves_end_balanced_with_one_owner_each(database: Database, group: str, url: str) -> None:
    async def come_and_go(name: str) -> None:
        chance = random.Random(name)
        for _ in range(5):
            await join(database, name)
            for _ in range(chance.randrange(3)):
                beat = await heartbeat(database, name)
                await ownership.release(database, "g", name, {slot: beat.owned[slot] for slot in beat.revoked})
                await take(database, name, sorted(beat.available))
            await leave(database, name)
        await join(database, name)

    await asyncio.gather(*[come_and_go(f"m{n}") for n in range(4)])
    final = await settle(database, *[f"m{n}" for n in range(4)])
    assert sorted(slot for slots in final.values() for slot in slots) == list(range(8))
    assert {len(slots) for slots in final.values()} == {2}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("select penstock.declare_group('a b', 8)", "invalid group name"),
        ("select penstock.declare_group('x', 0)", "invalid number of slots"),
        ("select penstock.declare_group('x', 8, 'nearest')", "unknown assignor"),
        ("select penstock.join_group('g', 'has space', gen_random_uuid())", "invalid member id"),
        ("select penstock.join_group('g', 'm', gen_random_uuid(), '1 ms')", "invalid dead_after"),
        ("select penstock.join_group('g', 'm', gen_random_uuid(), '10 s', '[]')", "metadata must be"),
        ("select penstock.set_targets('g', array[1], array[]::text[])", "differ in length"),
        ("select penstock.jump_hash(1, 0)", "0 buckets"),
    ],
)
async def test_bad_input_is_refused_with_what_was_wrong(database: Database, group: str, call: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        await database.fetch(call)


async def test_a_group_that_is_not_there_is_not_found(database: Database) -> None:
    with pytest.raises(NotFound, match="no such group"):
        await balance.join(database, "nowhere", "a", uuid4(), TEN_SECONDS, {}, None)


async def test_sql_hashes_keys_as_python_does(sql: Sql) -> None:
    chance = random.Random(4)
    keys = [chance.getrandbits(64) for _ in range(3000)]
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]
    for buckets in (1, 2, 11, 256, 65_536):
        got = await sql.fetchval(
            "select array_agg(penstock.jump_hash(key, $2) order by n) from unnest($1::bigint[]) with ordinality as k (key, n)",
            signed,
            buckets,
        )
        assert got == [jump_hash(key, buckets) for key in keys]
    for key in ("acme", "ö", "日本", "x" * 255):
        expected = key_hash(key)
        assert await sql.fetchval("select penstock.key_hash($1)", key) % (1 << 64) == expected
        assert await sql.fetchval("select penstock.slot_of($1, 256)", key) == slot_of(key, 256)


async def test_an_idle_heartbeat_is_one_hot_update(database: Database, group: str, sql: Sql) -> None:
    await join(database, "a")
    await settle(database, "a")
    await sql.execute("select pg_stat_force_next_flush()")
    for _ in range(50):
        await heartbeat(database, "a")
    await database.fetch("select pg_stat_force_next_flush()")
    updated, hot = await sql.fetchrow(
        "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'penstock.members'::regclass"
    )
    assert updated >= 50
    assert hot >= 0.9 * updated
