"""An event that cannot be decoded fails alone, on every surface; and no event becomes larger than its stream admits."""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from typing import Any, TypeAlias

import asyncpg
import pytest
import zstandard

from penstock import Event, Halted, InvalidInput, NewEvent, NotFound, Penstock, Stream
from penstock.errors import Unreadable
from penstock.streams import queries as streams
from penstock.streams.compression import LEAST_BOUND, pack, unpack
from penstock.testing import running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
POLICIES = ["skip", "dead-letter", "quarantine", "halt"]


def streamed(payload: bytes) -> bytes:
    """A frame that does not say how large it becomes."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(payload) + packer.flush()


# Fifteen bytes that claim 2^45; a bomb; and what is no frame, or not all of one.
CLAIM = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**45) + b"\x01\x00"
BOMB = streamed(b"\0" * (LEAST_BOUND + 1))
FRAMES = {"claim": CLAIM, "bomb": BOMB, "no frame": b"hello, hello", "cut": streamed(b"x" * 1000)[:-3], "empty": b""}


async def all_done(stream: Stream[Any]) -> bool:
    with suppress(NotFound):
        found = await stream.lag("g")
        return bool(found) and not any(lag.lag for lag in found)
    return False


async def write(sql: Sql, stream: str, column: str, element: Any, time: str = "null") -> None:
    """A chunk of one event past all checks, behind all others."""
    (table,) = await sql.fetchrow("select table_name from penstock.segments order by id desc limit 1")
    kind = "json[]" if column == "data" else "bytea[]"
    await sql.execute(
        f"insert into penstock.{table} (partition, first_offset, events, appended_at, times, {column})"
        f" select 0, next_offset, 1, now(), array[{time}::text::timestamptz], array[$1]::{kind} from penstock.stream_bounds($2)",
        element, stream,
    )  # fmt: skip


def test_unpacking_has_a_bound_whatever_a_frame_says() -> None:
    for name, frame in FRAMES.items():
        with pytest.raises(Unreadable):
            unpack(frame, 1000)
            pytest.fail(name)
    for payload in (b"", b"x", b"x" * 1_000_000):
        assert unpack(pack(payload), 0) == unpack(streamed(payload), 0) == payload
    assert len(unpack(BOMB, 2 * LEAST_BOUND)) == LEAST_BOUND + 1


@pytest.mark.parametrize("policy", POLICIES)
async def test_frames_that_cannot_be_unpacked_follow_the_policy(app: Penstock, sql: Sql, policy: str) -> None:
    events = app.stream("events", bytes, partitions=1, compression="zstd")
    await events.append_many([b"0", b"1"])
    odd = list(FRAMES.values()) if policy in ("skip", "dead-letter") else [CLAIM]
    for frame in odd:
        await write(sql, "events", "bytes", frame)
    await events.append_many([b"3"])
    seen: list[bytes] = []

    @events.consumer(group="g", on_failure=policy)
    async def handle(event: Event[bytes]) -> None:
        seen.append(event.data)

    halts: AbstractContextManager[Any] = pytest.raises(Halted, match="cannot be unpacked") if policy == "halt" else nullcontext()
    with halts:
        async with running_worker(app):
            if policy in ("skip", "dead-letter"):
                await eventually(lambda: all_done(events), "all events done")
                assert seen == [b"0", b"1", b"3"]
            else:
                await eventually(lambda: stopped(events), "the partition stopped")
                assert seen == [b"0", b"1"]
    if policy == "dead-letter":
        kept = await sql.fetch("select bytes from penstock.read_events('events.dead', 0)")
        assert [row["bytes"] for row in kept] == odd


async def stopped(stream: Stream[Any]) -> bool:
    with suppress(NotFound):
        return any(lag.quarantined or lag.halt_error for lag in await stream.lag("g"))
    return False


@pytest.mark.parametrize("policy", ["skip", "dead-letter"])
@pytest.mark.parametrize("time", ["20000-01-01", "4000-01-01 BC"])
async def test_an_event_with_an_odd_time_fails_alone(app: Penstock, sql: Sql, policy: str, time: str) -> None:
    events = app.stream("events", int, partitions=1)
    moment = datetime(2026, 1, 31, tzinfo=UTC)
    await events.append_many([NewEvent(0, time=moment)])
    await write(sql, "events", "data", "1", f"'{time}'")
    await events.append_many([NewEvent(2, time=moment)])
    seen: list[tuple[int, Any]] = []

    @events.consumer(group="g", on_failure=policy)
    async def handle(event: Event[int]) -> None:
        seen.append((event.data, event.time))

    async with running_worker(app):
        await eventually(lambda: all_done(events), "all events done")
    assert seen == [(0, moment), (2, moment)]
    if policy == "dead-letter":
        assert await sql.fetchval("select count(*) from penstock.read_events('events.dead', 0)") == 1


async def test_readers_go_on_past_what_cannot_be_read(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many([0])
    await write(sql, "events", "data", "1", "'20000-01-01'")
    await sql.execute("select penstock.append('events', '1e400')")
    await events.append_many([3])
    assert [event.data for event in await events.read(0, 0)] == [0]
    for offset in (1, 2):
        with pytest.raises(Unreadable, match=f"offset {offset} of partition 0"):
            await events.read(0, offset)
    assert [event.data for event in await events.read(0, 3)] == [3]
    found: list[Any] = []
    async with events.tail("earliest") as tail:
        while len(found) < 4:
            try:
                found.append((await anext(tail)).data)
            except Unreadable as error:
                found.append(error.message[:8])
    assert found == [0, "offset 1", "offset 2", 3]


async def test_whole_numbers_come_back_exactly(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", partitions=1)
    await events.declare()
    numbers = [2**53 + 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**300, 12345678901234567890123]
    append = "select penstock.append('events', $1::text::json, null, $2::text::json)"
    for number in numbers:
        await sql.execute(append, f"[{number}]", f'{{"n": {number}}}')
    found = await events.read(0)
    assert [event.data for event in found] == [[number] for number in numbers]
    assert [event.headers for event in found] == [{"n": number} for number in numbers]


@pytest.mark.parametrize("payload", [float("nan"), {"a": [float("inf")]}])
@pytest.mark.parametrize("typed", [True, False])
async def test_what_is_no_number_in_json_is_refused(app: Penstock, payload: Any, typed: bool) -> None:
    kind: Any = (dict[str, list[float]] if isinstance(payload, dict) else float) if typed else Any
    events = app.stream("events", kind, partitions=1)
    with pytest.raises(InvalidInput, match="JSON cannot represent"):
        await events.append(payload)
    with pytest.raises(InvalidInput, match="JSON cannot represent"):
        await events.append(None if typed else 1, headers={"n": payload})


@pytest.mark.parametrize("time", ["infinity", "-infinity", "20000-01-01T00:00:00Z"])
async def test_no_append_admits_a_time_that_readers_have_not(sql: Sql, time: str) -> None:
    await sql.execute("select penstock.create_stream('events', 1)")
    for call in (
        "penstock.append('events', '1', null, null, $1::text::timestamptz)",
        "penstock.append_many('events', array['1', '2']::json[], p_times => array[null, $1::text::timestamptz])",
        "penstock.append_json('events', jsonb_build_array(jsonb_build_object('data', 1, 'time', $1::text)))",
        "penstock.append_routed('events', 1, '{0}', '{1}', array['1']::json[], null, null, null, array[$1::text::timestamptz])",
    ):
        with pytest.raises(asyncpg.PostgresError, match="out of range") as refused:
            await sql.fetch(f"select {call}", time)
        assert refused.value.sqlstate == "PS400", call


async def test_the_limit_of_an_event_is_that_of_what_it_becomes(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", bytes, partitions=1, compression="zstd")
    await events.declare()
    await sql.execute("select penstock.change_stream('events', '{\"max_event_bytes\": 100000}')")
    await events.append(b"\0" * 100_000)
    producer = events.producer()
    for refused in (lambda data: events.append(data), lambda data: events.load([data]), lambda data: producer.append(data)):
        with pytest.raises(InvalidInput, match="100000"):
            await refused(b"\0" * 100_001)
    for size in (200, 60_000, 70_000, 100_000):
        assert await sql.fetchval("select penstock.unpacked_size($1)", pack(b"\0" * size)) == size
    for size in (255, 256, 65_791, 65_792, 16_777_216):
        assert await sql.fetchval("select penstock.unpacked_size($1)", pack(b"\0" * size)) == size
    for name, frame in FRAMES.items():
        if name in ("claim", "no frame", "empty"):
            with pytest.raises(asyncpg.PostgresError) as wrong:
                await sql.fetch("select penstock.append_routed('events', 1, '{0}', '{1}', null, array[$1::bytea])", frame)
            assert wrong.value.sqlstate == "PS413", name
    assert await sql.fetchval("select penstock.unpacked_size($1)", streamed(b"\0" * 1000)) == 0
    assert (await events.read(0))[0].data == b"\0" * 100_000


async def test_a_chunk_is_unpacked_a_few_events_at_a_time(app: Penstock) -> None:
    events = app.stream("events", bytes, partitions=1, compression="zstd")
    await events.append_many([b"\0" * 1_000_000] * 1_000)
    (chunk,) = await chunks_of(app)
    unpacked = 0
    iterator = events.encoding.each(chunk, 0)
    original, events.encoding.decode = events.encoding.decode, lambda stored: count(original(stored))  # type: ignore[method-assign]

    def count(data: bytes) -> bytes:
        nonlocal unpacked
        unpacked += 1
        return data

    next(iterator)
    assert 1 <= unpacked <= 16
    assert sum(1 for _ in iterator) == 999


async def chunks_of(app: Penstock) -> list[Any]:
    return await streams.read_chunks(await app.database(), "events", {0: 0}, 1_000)
