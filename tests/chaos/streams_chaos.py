"""Streams while consumers are killed, frozen and cut off, the server crashes, producers retry, streams grow."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import held
from proxy import Proxy
from queue_chaos import seeded, until_taken, was_taken
from seeking import until_found

from checker.history import Gone
from checker.streams import (
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
from checker.tables import clock_difference
from penstock import NewEvent, Penstock, PenstockError, Stream
from penstock.postgres.embedded import EmbeddedServer
from penstock.settings import Settings

CONSUMERS = 3
PRODUCERS = 3
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
-- A commit has the row to itself, as the begin of an owner has: this is whose epoch it was at that moment.
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


class Consumers:
    """Worker processes, as an operator would run them; the first one behind a proxy."""

    def __init__(self, url: str, proxy: Proxy, history: Path, sabotage: str, long: bool) -> None:
        self.gone: list[Gone] = []
        self.cut: list[Gone] = []
        self.frozen: dict[str, float] = {}
        self.frozen_holders = 0
        self.cut_now: dict[str, float] = {}
        self._proxy = proxy
        self._held = history.parent / "held"
        self._held.mkdir()
        self._urls = [proxy.url] + [url] * (CONSUMERS - 1)
        self._environment = {
            **os.environ,
            "CHAOS_HISTORY": str(history),
            "CHAOS_SABOTAGE": sabotage,
            "CHAOS_LONG": "1" if long else "",
            # What is missing in a worker is sought with the cuts, which these freezes would take the place of.
            "CHAOS_HELD": str(self._held) if long and not sabotage else "",
            "PENSTOCK_HEARTBEAT_INTERVAL": "0.4",
            "PENSTOCK_DEAD_AFTER": "2",
            "PENSTOCK_POLL_INTERVAL": "0.3",
            "PENSTOCK_COMMAND_TIMEOUT": "3",
        }
        self._log = history.with_suffix(".log").open("ab")
        self.processes = [self._start(place) for place in range(CONSUMERS)]

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock", "worker", "stream_workload:app"]
        environment = {**self._environment, "PENSTOCK_DATABASE_URL": self._urls[place]}
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parent, stdout=self._log, stderr=self._log)

    def kill_one(self, chance: random.Random) -> None:
        place = chance.randrange(CONSUMERS)
        self.processes[place].kill()
        self.processes[place].wait()
        self.gone.append(Gone(str(self.processes[place].pid), time.monotonic()))
        held.forget(self._held, str(self.processes[place].pid))
        self.processes[place] = self._start(place)

    async def freeze_one(
        self, chance: random.Random, seconds: float, taken: Callable[[str], Awaitable[bool]] | None = None
    ) -> None:
        process = self.processes[chance.randrange(CONSUMERS)]
        process.send_signal(signal.SIGSTOP)
        at = self.frozen[str(process.pid)] = time.monotonic()
        if taken is not None:
            await until_taken(taken, process.pid)
        await asyncio.sleep(seconds)
        self.frozen.pop(str(process.pid), None)
        # One that was killed meanwhile is gone already, for good.
        self.gone.append(Gone(str(process.pid), at, time.monotonic()))
        process.send_signal(signal.SIGCONT)

    @property
    def holders(self) -> set[str]:
        """Processes that keep a batch in hand, to be frozen with it; not those that wait for one which was."""
        keeping = {each.worker for each in held.notes(self._held) if not held.older_than(self._held, each)}
        return keeping & {str(process.pid) for process in self.processes}

    async def freeze_holder(self, chance: random.Random) -> None:
        """Freeze one with a batch in hand until another member is at work on its partition: its commit is too late then."""
        if not (holders := sorted(self.holders)):
            return
        worker = chance.choice(holders)
        self.frozen_holders += 1
        process = next(process for process in self.processes if str(process.pid) == worker)
        process.send_signal(signal.SIGSTOP)
        at = self.frozen[worker] = time.monotonic()
        own = [each for each in held.notes(self._held) if each.worker == worker]

        async def at_work(_: str) -> bool:
            return any(other.later_than(each) for other in held.notes(self._held) for each in own)

        await until_taken(at_work, process.pid)
        self.frozen.pop(worker, None)
        self.gone.append(Gone(worker, at, time.monotonic()))
        held.thaw(self._held, worker)
        process.send_signal(signal.SIGCONT)

    async def cut_off(self, seconds: float, taken: Callable[[str], Awaitable[bool]] | None = None) -> None:
        """Cut what goes through the proxy, a consumer and a producer: nothing passes, and nobody is told."""
        self._proxy.cut()
        worker, at = str(self.processes[0].pid), time.monotonic()
        self.cut_now[worker] = at
        try:
            if taken is not None:
                await until_taken(taken, int(worker))
            await asyncio.sleep(seconds)
        finally:
            self._proxy.mend()
            self.cut_now.clear()
        # Its connections are new ones then.
        self.cut.append(Gone(worker, at, time.monotonic() + 1.0))

    def revive(self) -> None:
        """Start those anew that ended by themselves, as a supervisor would: one that finds no database at its start gives up."""
        for place, process in enumerate(self.processes):
            if process.poll() is not None:
                self.gone.append(Gone(str(process.pid), time.monotonic() - 1.0))
                self.processes[place] = self._start(place)

    def stop(self, at_once: bool = False) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            if at_once:
                process.kill()
            else:
                process.terminate()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()


async def produce(stream: Stream[str], name: int, until: float, sent: list[Sent], appended: dict[str, list[str]]) -> None:
    """Append batches under numbers of their own, again and again until each is acknowledged."""
    chance = random.Random(name)
    producer = stream.producer(f"producer-{name}")
    number = 0
    while time.monotonic() < until:
        batch = []
        for _ in range(chance.randrange(1, 20)):
            key = f"{name}-{chance.randrange(8)}"
            batch.append(NewEvent(f"{key}:{number}", key))
            number += 1
        positions = await producer.append_many(batch)
        for event, position in zip(batch, positions, strict=True):
            assert event.key is not None
            sent.append(Sent(position.partition, position.offset, event.data, event.key))
            appended[event.key].append(event.data)
        await asyncio.sleep(chance.uniform(0, 0.05))


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    violations: list[str]
    killed: int
    frozen: int
    cut: int
    sent: int
    handled: int


async def run_streams(
    folder: Path,
    seconds: float,
    *,
    prepare: Callable[[Penstock], Awaitable[None]] | None = None,
    sabotage: str = "",
    caught_up_within: float = 90.0,
    sought: str = "",
    long: bool = False,
) -> Result:
    """Run the workload with its troubles and check what came of it.

    Args:
        folder: For the server's files and the history.
        seconds: How long to append.
        prepare: Called with the migrated database before the consumers start.
        sabotage: What the consumers are to do wrong.
        caught_up_within: When the groups are not done by then, what is left counts as never handled.
        sought: A regular expression for a violation: when there is one the run ends at once.
        long: Some batches, and the times for which consumers are stopped or cut off, outlast the takeover of what they had.
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
    await connection.execute(NOTE_COMMITS)
    await connection.close()
    if prepare is not None:
        await prepare(app)
    proxy = await Proxy(url).__aenter__()
    behind = Penstock(proxy.url, settings=Settings(command_timeout=timedelta(seconds=3)))
    await behind.open()
    consumers = Consumers(url, proxy, history, sabotage, long)
    sent: list[Sent] = []
    appended: dict[str, list[str]] = defaultdict(list)
    troubles: list[asyncio.Task[None]] = []
    returning: list[asyncio.Task[tuple[float, float]]] = []

    def cut_s() -> float:
        return chance.uniform(1, 2) if long else chance.uniform(1, 4)

    taken = partial(was_taken, app) if long else None

    async def whole() -> Result:
        until = time.monotonic() + seconds
        streams = [behind.stream("chaos", str, partitions=6), *[stream] * (PRODUCERS - 1)]
        producing = [asyncio.create_task(produce(each, name, until, sent, appended)) for name, each in enumerate(streams)]
        troubles.extend(producing)
        cutting = asyncio.create_task(consumers.cut_off(cut_s(), taken))
        troubles.append(cutting)
        crash_at, grow_at = until - seconds * 0.5, until - seconds * 0.3
        next_blow = time.monotonic() + 3
        # Until it has grown too: on a busy machine recovery and appends can hold that up for longer.
        while time.monotonic() < until or (grow_at < float("inf") and time.monotonic() < until + 60):
            consumers.revive()
            # Somebody has to be left to take what one of them had.
            waits = taken is not None and (consumers.frozen or consumers.cut_now)
            if time.monotonic() > next_blow and not waits:
                blow = chance.choice(["kill", "freeze", "cut", "cut", "cut"] if long else ["kill", "freeze", "cut"])
                # Once for certain.
                if long and consumers.holders and (consumers.frozen_holders == 0 or chance.random() < 0.5):
                    troubles.append(asyncio.create_task(consumers.freeze_holder(chance)))
                elif blow == "kill":
                    consumers.kill_one(chance)
                elif blow == "cut" and cutting.done():
                    cutting = asyncio.create_task(consumers.cut_off(cut_s(), taken))
                    troubles.append(cutting)
                else:
                    troubles.append(asyncio.create_task(consumers.freeze_one(chance, 1.5 if long else 3.5, taken)))
                next_blow = time.monotonic() + chance.uniform(0.8, 2)
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

        with suppress(TimeoutError):
            async with asyncio.timeout(caught_up_within):
                while not await caught_up():
                    await asyncio.sleep(0.05)
        consumers.stop()
        violations, handled = await check(app, stream, consumers, sent, appended, history, [await task for task in returning])
        killed = sum(gone.back == float("inf") for gone in consumers.gone)
        return Result(violations, killed, len(consumers.gone) - killed, len(consumers.cut), len(sent), handled)

    async def look() -> list[str]:
        if not all(task.done() for task in returning):
            return []
        return (await check(app, stream, consumers, sent, appended, history, [task.result() for task in returning]))[0]

    def found(violations: list[str]) -> Result:
        return Result(violations, 0, 0, 0, 0, 0)

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
) -> tuple[list[str], int]:
    """What has happened so far: what is wrong, and how many events were handled."""
    said, keys = list(sent), {key: list(values) for key, values in appended.items()}
    database = await app.database()
    # Each of these is read before what has to be there for it.
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
    log: dict[int, list[tuple[int, str, str]]] = {}
    for partition, bounds in (await stream.bounds()).items():
        events: list[Any] = await stream.read(partition, 0, max(1, bounds.next))
        log[partition] = [(event.offset, str(event.key), event.data) for event in events]

    def checked() -> list[str]:
        violations = check_log(log, said) + check_group(log, Consumed(handled, committed, gone, cut, away), keys)
        exact = check_exactly_once(log, written) + check_epochs(Stamped(*row) for row in stamped)  # type: ignore[arg-type]
        return violations + [f"{each} (by the group exact)" for each in exact]

    return await asyncio.to_thread(checked), len(handled)


async def _return_of(stream: Stream[str], away: float) -> tuple[float, float]:
    """From when to when the database was away, with the time that members have to say that they live."""
    while True:
        with suppress(PenstockError):
            await stream.lag()
            return away, time.monotonic() + 4.0
        await asyncio.sleep(0.05)
