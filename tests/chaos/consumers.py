"""The consumers of the chaos runs of streams: processes that are killed, frozen and cut off, and the partitions that they own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock import Penstock, PenstockError
from tests.chaos import held
from tests.chaos.proxy import Proxy
from tests.chaos.queue_chaos import until_taken, was_taken
from tests.checker.history import Gone

CONSUMERS = 3


class Ownership:
    """The owners of the partitions of the recording group, according to the database."""

    def __init__(self, app: Penstock) -> None:
        self._app = app

    async def is_shared(self, workers: Sequence[str]) -> bool:
        """Whether each of these processes owns a partition."""
        query = "select exists (select from penstock.slots where group_name = 'chaos/plain' and owner like '%.' || $1 || '.%')"
        return all([await self._ask(query, worker) for worker in workers])

    async def was_taken(self, worker: str) -> bool:
        """Whether a process was evicted, and other members own its partitions."""
        return await was_taken(self._app, worker) and await self._ask(
            "select not exists (select from penstock.slots"
            " where group_name = 'chaos/plain' and (owner is null or owner like '%.' || $1 || '.%'))",
            worker,
        )

    async def _ask(self, query: str, worker: str) -> bool:
        with suppress(PenstockError):
            return bool(await (await self._app.database()).fetchval(query, worker))
        return False


class Consumers:
    """Worker processes, started as an operator starts them; the first one is behind a proxy."""

    def __init__(self, url: str, proxy: Proxy, history: Path, sabotage: str, long: bool) -> None:
        self.gone: list[Gone] = []
        self.cut: list[Gone] = []
        self.frozen: dict[str, float] = {}
        self.frozen_holders = 0
        self.cut_now: dict[str, float] = {}
        self._proxy = proxy
        self._held = history.parent / "held"
        self._held.mkdir()
        self._slow = history.parent / "slow"
        self._slow.mkdir()
        self._urls = [proxy.url] + [url] * (CONSUMERS - 1)
        self._environment = {
            **os.environ,
            "CHAOS_HISTORY": str(history),
            "CHAOS_SABOTAGE": sabotage,
            "CHAOS_LONG": "1" if long else "",
            "CHAOS_SLOW": str(self._slow),
            # Sabotages of a worker show in the cuts, and these freezes would take the place of the cuts.
            "CHAOS_HELD": str(self._held) if long and not sabotage else "",
            "PENSTOCK_HEARTBEAT_INTERVAL": "0.4",
            "PENSTOCK_DEAD_AFTER": "2",
            "PENSTOCK_POLL_INTERVAL": "0.3",
            "PENSTOCK_COMMAND_TIMEOUT": "3",
        }
        self._log = history.with_suffix(".log").open("ab")
        self.processes = [self._start(place) for place in range(CONSUMERS)]

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock", "worker", "tests.chaos.stream_workload:app"]
        environment = {**self._environment, "PENSTOCK_DATABASE_URL": self._urls[place]}
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdout=self._log, stderr=self._log)

    def kill_one(self, chance: random.Random) -> None:
        place = chance.randrange(CONSUMERS)
        self.processes[place].kill()
        self.processes[place].wait()
        self.gone.append(Gone(str(self.processes[place].pid), time.monotonic()))
        held.forget(self._held, str(self.processes[place].pid))
        self.processes[place] = self._start(place)

    async def freeze_one(self, chance: random.Random, seconds: float, ownership: Ownership | None = None) -> None:
        process = self.processes[chance.randrange(CONSUMERS)]
        process.send_signal(signal.SIGSTOP)
        at = self.frozen[str(process.pid)] = time.monotonic()
        if ownership is not None:
            await until_taken(ownership.was_taken, process.pid)
        # The length of the suspension is what is tested; no condition can take the place of the sleep.
        await asyncio.sleep(seconds)
        self.frozen.pop(str(process.pid), None)
        # A process that was killed in the meantime is recorded as gone for ever.
        self.gone.append(Gone(str(process.pid), at, time.monotonic()))
        process.send_signal(signal.SIGCONT)

    @property
    def ids(self) -> list[str]:
        """The ids of the processes."""
        return [str(process.pid) for process in self.processes]

    @property
    def holders(self) -> set[str]:
        """Processes that hold a batch so as to be frozen with it, without those that wait for the batch of a frozen process."""
        keeping = {each.worker for each in held.notes(self._held) if not held.older_than(self._held, each)}
        return keeping & {str(process.pid) for process in self.processes}

    async def freeze_holder(self, chance: random.Random) -> None:
        """Freeze a process that holds a batch until another member works on its partition, so that its commit comes too late."""
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

    async def cut_off(self, seconds: float, ownership: Ownership | None = None) -> None:
        """Cut the connections through the proxy, those of a consumer and a producer: no data passes, and no connection is closed.

        With `ownership` the handlers of the consumer run until other members own its partitions.
        """
        worker = str(self.processes[0].pid)
        # From here on the other faults leave this process alone.
        self.cut_now[worker] = time.monotonic()
        slow = self._slow / worker
        if ownership is not None:
            slow.touch()
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    while not slow.with_suffix(".in-hand").exists():
                        await asyncio.sleep(0.02)
        at = self.cut_now[worker] = time.monotonic()
        # The server executes the requests that are under way, and their answers are lost.
        self._proxy.cut(answers_first_s=0.1)
        try:
            if ownership is not None:
                await until_taken(ownership.was_taken, int(worker))
            # The length of the interruption is what is tested.
            await asyncio.sleep(seconds)
            if ownership is not None:
                slow.unlink()
                slow.with_suffix(".in-hand").unlink(missing_ok=True)
                # In this time the running handlers record their events, unless they were stopped.
                await asyncio.sleep(0.3)
        finally:
            self._proxy.mend()
            self.cut_now.clear()
        # After this second it has new connections.
        self.cut.append(Gone(worker, at, time.monotonic() + 1.0))

    def revive(self) -> None:
        """Restart processes that ended by themselves, as a supervisor does: without a database at its start a process ends."""
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
