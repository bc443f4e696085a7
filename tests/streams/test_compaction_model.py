"""Compaction against a model: whatever was compacted when, a reader from the beginning ends with the map of the whole log."""

from __future__ import annotations

import random
from datetime import datetime
from typing import Any, TypeAlias

import asyncpg

from penstock import NewEvent, Penstock, Stream

Sql: TypeAlias = "asyncpg.Connection[Any]"
TRACES, STEPS, KEYS = 14, 30, 2


class Log:
    """The whole log as a list, which is never compacted."""

    def __init__(self) -> None:
        self.latest: dict[str, int | None] = {}
        self.unkeyed: list[int] = []
        self.appended: dict[tuple[int, int], datetime] = {}

    def state(self) -> dict[str, int]:
        return {key: value for key, value in self.latest.items() if value is not None}


async def read_all(stream: Stream[int], log: Log) -> tuple[dict[str, int], list[int]]:
    """What a reader from the beginning ends with: the map, and the events without a key."""
    latest: dict[str, int | None] = {}
    unkeyed: list[int] = []
    for partition, bounds in (await stream.bounds()).items():
        at = bounds.first
        while found := await stream.read(partition, at, 7):
            for event in found:
                assert event.offset >= at
                at = event.offset + 1
                known = log.appended.setdefault((partition, event.offset), event.appended_at)
                assert event.appended_at == known, "the time of the append changed"
                if event.key is None:
                    unkeyed.append(event.data)
                else:
                    latest[event.key] = event.data
        assert at == bounds.next, "a reader does not come to the end"
    return {key: value for key, value in latest.items() if value is not None}, sorted(unkeyed)


async def test_a_reader_of_a_compacted_stream_ends_with_the_map_of_the_whole_log(app: Penstock, sql: Sql) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for trace in range(TRACES):
        name = f"prices{trace}"
        stream = app.stream(name, int, partitions=chance.choice([1, 2]), compact=True)
        await stream.declare()
        log, steps, counter = Log(), [], 0
        for _ in range(STEPS):
            step = chance.choices(["append", "roll", "compact", "age", "grow"], [8, 6, 5, 2, 0.3])[0]
            steps.append(step)
            match step:
                case "append":
                    events = []
                    for _ in range(chance.randint(1, 3)):
                        counter += 1
                        key = chance.choice([None, *(f"k{n}" for n in range(KEYS))])
                        value = None if key is not None and chance.random() < 0.4 else counter
                        events.append(NewEvent(value, key=key))
                        if key is None:
                            log.unkeyed.append(counter)
                        else:
                            log.latest[key] = value
                    await stream.append_many(events)
                case "roll":
                    await sql.execute("select penstock.roll_segment($1)", name)
                case "compact":
                    await sql.execute("select penstock.compact_stream($1)", name)
                case "age":
                    age = chance.choice(["1 microsecond", "1 day"])
                    await sql.execute(
                        "select penstock.change_stream($1, jsonb_build_object('tombstone_age', $2::text))", name, age
                    )
                case "grow":
                    await sql.execute("select penstock.grow_stream($1, $2)", name, len(await stream.bounds()) + 1)
            if counter:
                assert await read_all(stream, log) == (log.state(), sorted(log.unkeyed)), f"seed {seed}, trace {trace}: {steps}"
