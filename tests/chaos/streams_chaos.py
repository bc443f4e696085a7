"""Streams while consumers are killed, frozen and cut off, the server crashes, producers retry, streams grow."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from penstock import NewEvent, Penstock, PenstockError, Position, Stream
from penstock.postgres.embedded import EmbeddedServer
from penstock.settings import Settings
from tests.chaos.consumers import Consumers, Ownership
from tests.chaos.draining import until_over
from tests.chaos.late import held_snapshot, late_transaction
from tests.chaos.proxy import Proxy
from tests.chaos.queue_chaos import seeded
from tests.chaos.seeking import until_found
from tests.checker.history import Gone
from tests.checker.owners import NOTE_OWNERS, Begun, check_begun, check_owners, owners
from tests.checker.streams import (
    Committed,
    Consumed,
    Sent,
    Stamped,
    check_epochs,
    check_exactly_once,
    check_group,
    check_log,
    read_handled,
)
from tests.checker.tables import clock_difference
from tests.waiting import eventually

PRODUCERS = 3
LATE_PRODUCERS = 2
# Shorter than those of jobs: an open append keeps its partitions from all others.
LATE_HOLDS_S = (0.02, 0.05, 0.3, 1.0)
NOTE_COMMITS = """
create table public.chaos_commits (partition integer, next_offset bigint, at timestamptz);
create function public.chaos_note() returns trigger language plpgsql security definer as $do$
begin
    insert into public.chaos_commits values (new.partition, new.next_offset, clock_timestamp());
    return null;
end
$do$;
create trigger chaos_note after update on penstock.group_offsets for each row
when (new.group_id = 'plain' and new.next_offset <> old.next_offset) execute function public.chaos_note();
create table public.chaos_written (
    partition integer, event_offset bigint, value text, epoch bigint, transaction xid8 default pg_current_xact_id()
);
-- A commit and the begin of an owner both lock the row, so this is the epoch of the owner at the moment of the commit.
create table public.chaos_epochs (partition integer, epoch bigint, transaction xid8);
create function public.chaos_note_epoch() returns trigger language plpgsql security definer as $do$
begin
    insert into public.chaos_epochs values (new.partition, new.epoch, pg_current_xact_id());
    return null;
end
$do$;
create trigger chaos_note_epoch after update on penstock.group_offsets for each row
when (new.group_id = 'exact' and new.epoch = old.epoch) execute function public.chaos_note_epoch();
"""


async def produce(
    stream: Stream[str], name: int, goes_on: Callable[[], bool], sent: list[Sent], appended: dict[str, list[str]]
) -> None:
    """Append batches as a named producer; each batch is repeated until it is acknowledged."""
    chance = random.Random(name)
    producer = stream.producer(f"producer-{name}")
    number = 0
    while goes_on():
        batch = []
        for _ in range(chance.randrange(1, 20)):
            key = f"{name}-{chance.randrange(8)}"
            batch.append(NewEvent(f"{key}:{number}", key))
            number += 1
        begun = time.monotonic()
        positions = await producer.append_many(batch)
        committed = time.monotonic()
        for event, position in zip(batch, positions, strict=True):
            assert event.key is not None
            sent.append(Sent(position.partition, position.offset, event.data, event.key, begun=begun, committed=committed))
            appended[event.key].append(event.data)
        # A pause of the load: there is nothing to wait for.
        await asyncio.sleep(chance.uniform(0, 0.05))


@dataclass
class Late:
    """Appends in transactions of callers, which overlap, hold their partitions for a while, and may be rolled back."""

    stream: Stream[str]
    url: str
    sent: list[Sent]
    withdrawn: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    committed: int = 0

    async def produce(self, chance: random.Random, goes_on: Callable[[], bool]) -> None:
        """Append to a few keys that all these producers share."""
        while goes_on():
            transaction, begun = next(self.numbers), time.monotonic()
            events = [
                NewEvent(f"late:{transaction}:{place}", f"late-{chance.randrange(4)}") for place in range(chance.randrange(1, 5))
            ]
            commits, values = chance.random() < 0.7, {event.data for event in events}
            positions: list[Position] = []

            async def append(connection: Any, some: list[NewEvent[str]], into: list[Position] = positions) -> None:
                into.extend(await self.stream.append_many(some, connection=connection))

            calls = [partial(append, some=events[:2]), partial(append, some=events[2:])] if len(events) > 2 else []
            # Until the end it may be either, also for a check in the midst of it.
            self.unknown |= values
            ended = await late_transaction(
                self.url, calls or [partial(append, some=events)], chance, commits=commits, holds_s=LATE_HOLDS_S
            )
            committed = time.monotonic()
            if ended is None:
                continue
            if ended:
                self.committed += 1
                self.sent += [
                    Sent(at.partition, at.offset, event.data, str(event.key), transaction, place, begun, committed)
                    for place, (event, at) in enumerate(zip(events, positions, strict=True))
                ]
            else:
                self.withdrawn |= values
            self.unknown -= values
            # A pause of the load: there is nothing to wait for.
            await asyncio.sleep(chance.uniform(0, 0.3))


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    violations: list[str]
    killed: int
    frozen: int
    cut: int
    sent: int
    handled: int
    late: int
    withdrawn: int


async def run_streams(
    folder: Path,
    seconds: float,
    *,
    prepare: Callable[[Penstock], Awaitable[None]] | None = None,
    sabotage: str = "",
    stands_s: float = 60.0,
    sought: str = "",
    long: bool = False,
    held: bool = False,
) -> Result:
    """Run the workload with its faults and check the history.

    Args:
        folder: Folder for the server's files and the history.
        seconds: Seconds of appending.
        prepare: Called with the migrated database before the consumers start.
        sabotage: Name of the sabotage of the consumers, see `broken_worker`.
        stands_s: Seconds in which no group advances, after which the events that are left count as never handled.
        sought: A regular expression for a violation; the run ends as soon as one matches.
        long: Some batches, and the times for which consumers are suspended or cut off, last until other members have taken over.
        held: A transaction stays open from before the first event until after the last one; so the server does not crash.
    """
    chance = seeded()
    history = folder / "history.jsonl"
    history.touch()
    server = EmbeddedServer(folder / "server")
    url = await asyncio.to_thread(server.start)
    app = Penstock(url, settings=Settings(command_timeout=timedelta(seconds=5)))
    await app.migrate()
    stream = app.stream("chaos", str, partitions=6)
    await stream.declare()
    database = await app.database()
    connection = await database.connect()
    await connection.execute(NOTE_COMMITS + NOTE_OWNERS)
    await connection.close()
    if prepare is not None:
        await prepare(app)
    proxy = await Proxy(url).__aenter__()
    behind = Penstock(proxy.url, settings=Settings(command_timeout=timedelta(seconds=3)))
    await behind.open()
    consumers = Consumers(url, proxy, history, sabotage, long)
    sent: list[Sent] = []
    appended: dict[str, list[str]] = defaultdict(list)
    late = Late(stream, url, sent)
    troubles: list[asyncio.Task[None]] = []
    returning: list[asyncio.Task[tuple[float, float]]] = []

    def cut_s() -> float:
        return chance.uniform(1, 2) if long else chance.uniform(1, 4)

    ownership = Ownership(app) if long else None

    async def whole() -> Result:
        async with held_snapshot(url, "public.chaos_commits") if held else nullcontext():
            return await faults_and_end()

    async def faults_and_end() -> Result:
        until = float("inf")
        streams = [behind.stream("chaos", str, partitions=6), *[stream] * (PRODUCERS - 1)]
        producing = [
            asyncio.create_task(produce(each, name, lambda: time.monotonic() < until, sent, appended))
            for name, each in enumerate(streams)
        ]
        producing += [
            asyncio.create_task(late.produce(random.Random(chance.getrandbits(32)), lambda: time.monotonic() < until))
            for _ in range(LATE_PRODUCERS)
        ]
        troubles.extend(producing)
        # A fault has no effect before the producer behind the proxy has begun and, in the long run, each consumer has partitions.
        await eventually(lambda: any(each.key.startswith("0-") for each in list(sent)), "the first events", timeout=60)
        if ownership is not None:
            await eventually(lambda: ownership.is_shared(consumers.ids), "the consumers", timeout=60)
        until = time.monotonic() + seconds
        cutting = asyncio.create_task(consumers.cut_off(cut_s(), ownership))
        troubles.append(cutting)
        crash_at, grow_at = float("inf") if held else until - seconds * 0.5, until - seconds * 0.3
        next_blow, shared_by = time.monotonic() + 3, time.monotonic() + 15
        # The run also waits for the growth, which recovery and appends can delay on a busy machine.
        while time.monotonic() < until or (grow_at < float("inf") and time.monotonic() < until + 60):
            consumers.revive()
            # One process at least has to be left to take over the partitions of another.
            waits = ownership is not None and (consumers.frozen or consumers.cut_now)
            if waits or (ownership is not None and time.monotonic() < shared_by and not await ownership.is_shared(consumers.ids)):
                pass
            elif time.monotonic() > next_blow:
                blow = chance.choice(["kill", "freeze", "cut", "cut", "cut"] if long else ["kill", "freeze", "cut"])
                # At least once in each run.
                if long and consumers.holders and (consumers.frozen_holders == 0 or chance.random() < 0.5):
                    troubles.append(asyncio.create_task(consumers.freeze_holder(chance)))
                elif blow == "kill":
                    consumers.kill_one(chance)
                elif blow == "cut" and cutting.done():
                    cutting = asyncio.create_task(consumers.cut_off(cut_s(), ownership))
                    troubles.append(cutting)
                else:
                    troubles.append(asyncio.create_task(consumers.freeze_one(chance, 1.5 if long else 3.5, ownership)))
                next_blow = time.monotonic() + chance.uniform(0.8, 2)
                # The wait is limited, since a sabotage may keep a consumer from owning any partition.
                shared_by = time.monotonic() + 15
            if time.monotonic() > crash_at:
                os.kill(int((folder / "server/postgres/postmaster.pid").read_text().split()[0]), signal.SIGKILL)
                returning.append(asyncio.create_task(_return_of(stream, time.monotonic())))
                crash_at = float("inf")
            if time.monotonic() > grow_at:
                with suppress(PenstockError):
                    await stream.grow(10)
                    grow_at = float("inf")
            await asyncio.sleep(0.05)
        await asyncio.gather(*troubles)
        await asyncio.gather(*producing)
        assert grow_at == float("inf")

        async def caught_up() -> bool:
            consumers.revive()
            with suppress(PenstockError):
                lags = await stream.lag()
                return len(lags) == 20 and not any(lag.lag for lag in lags)
            return False

        async def lag() -> object:
            return [(each.group, each.partition, each.lag) for each in await stream.lag()]

        await until_over(caught_up, lag, stands_s)
        consumers.stop()
        away = [await task for task in returning]
        violations, handled = await check(app, stream, consumers, sent, appended, history, away, late)
        killed = sum(gone.back == float("inf") for gone in consumers.gone)
        frozen = len(consumers.gone) - killed
        return Result(violations, killed, frozen, len(consumers.cut), len(sent), handled, late.committed, len(late.withdrawn))

    async def look() -> list[str]:
        if not all(task.done() for task in returning):
            return []
        away = [task.result() for task in returning]
        return (await check(app, stream, consumers, sent, appended, history, away, late))[0]

    def found(violations: list[str]) -> Result:
        return Result(violations, 0, 0, 0, 0, 0, 0, 0)

    try:
        return await until_found(whole(), sought, look, found)
    finally:
        for task in [*troubles, *returning]:
            task.cancel()
        await asyncio.gather(*troubles, *returning, return_exceptions=True)
        consumers.stop(at_once=bool(sought))
        await behind.close()
        await proxy.__aexit__()
        await app.close()
        await asyncio.to_thread(server.stop)


async def check(
    app: Penstock,
    stream: Stream[str],
    consumers: Consumers,
    sent: list[Sent],
    appended: dict[str, list[str]],
    path: Path,
    away: Sequence[tuple[float, float]],
    late: Late,
) -> tuple[list[str], int]:
    """The violations so far, and the number of handled events."""
    withdrawn = set(late.withdrawn)
    said, keys = list(sent), {key: list(values) for key, values in appended.items()}
    database = await app.database()
    # The order matters: each is read before the data that must exist for it.
    noted = await database.fetch(
        "select partition, next_offset, extract(epoch from at)::float8 as at from public.chaos_commits order by at"
    )
    difference = await clock_difference(database)
    committed = [Committed(row["partition"], row["next_offset"], row["at"] + difference) for row in noted]
    handled = [event for event in read_handled(path) if event.group == "plain"]
    gone = [*consumers.gone, *[Gone(worker, at) for worker, at in consumers.frozen.items()]]
    cut = [*consumers.cut, *[Gone(worker, at) for worker, at in consumers.cut_now.items()]]
    written = [tuple(row) for row in await database.fetch("select partition, event_offset, value from public.chaos_written")]
    stamped = await database.fetch(
        "select distinct partition, written.epoch, noted.epoch as begun"
        " from public.chaos_written as written join public.chaos_epochs as noted using (transaction, partition)"
    )
    owned = await owners(database, difference)
    log: dict[int, list[tuple[int, str, str]]] = {}
    for partition, bounds in (await stream.bounds()).items():
        events: list[Any] = await stream.read(partition, 0, max(1, bounds.next))
        log[partition] = [(event.offset, str(event.key), event.data) for event in events]
    unknown = set(late.unknown)

    def checked() -> list[str]:
        violations = check_log(log, said, withdrawn, unknown)
        violations += check_group(log, Consumed(handled, committed, gone, cut, away), keys)
        violations += check_owners(owned)
        begun = {(event.partition, event.worker, event.begun): event for event in handled}
        batches = [
            Begun(f"the batch of {event.group} at {event.partition}:{event.offset}", "chaos/plain", partition, worker, at)
            for (partition, worker, at), event in begun.items()
        ]
        violations += check_begun(batches, owned, [*gone, *cut, *[Gone("", *span) for span in away]])
        exact = check_exactly_once(log, written) + check_epochs(Stamped(*row) for row in stamped)  # type: ignore[arg-type]
        return violations + [f"{each} (by the group exact)" for each in exact]

    return await asyncio.to_thread(checked), len(handled)


async def _return_of(stream: Stream[str], away: float) -> tuple[float, float]:
    """When the database was away, including the time that members have for their next heartbeat."""
    while True:
        with suppress(PenstockError):
            await stream.lag()
            return away, time.monotonic() + 4.0
        await asyncio.sleep(0.05)
