"""Pools of real processes that are killed, stopped and cut off from the database while jobs come; then the checkers decide."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from history import Event, Rules, check, read
from keyed_history import Gone, check_keys, check_standing
from proxy import Proxy
from test_chaos import rows

from conftest import eventually
from penstock import NewJob, Penstock, PenstockError, Settings

SECONDS = 40.0
KEYS = 24
ENVIRONMENT = {
    "PENSTOCK_HEARTBEAT_INTERVAL": "0.7",
    "PENSTOCK_DEAD_AFTER": "3",
    "PENSTOCK_CARE_INTERVAL": "0.3",
    "PENSTOCK_COMMAND_TIMEOUT": "3",
    "PENSTOCK_CONNECT_TIMEOUT": "2",
    "PENSTOCK_HANDOVER_GRACE": "1",
}


class Fleet:
    """Worker processes; one of them behind a proxy."""

    def __init__(self, url: str, proxied: str, history: Path) -> None:
        self.gone: list[Gone] = []
        self.what_happened: dict[str, int] = {}
        self._urls = [proxied, url, url, url]
        self._history = history
        self._log = history.with_suffix(".log").open("ab")
        self.workers = [self._start(place) for place in range(len(self._urls))]

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", "worker", "pool_workload:app", "--concurrency", "8"],
            env={**os.environ, **ENVIRONMENT, "PENSTOCK_DATABASE_URL": self._urls[place], "CHAOS_HISTORY": str(self._history)},
            cwd=Path(__file__).parent,
            stdout=self._log,
            stderr=self._log,
        )

    def note(self, what: str) -> None:
        self.what_happened[what] = self.what_happened.get(what, 0) + 1

    def kill(self, place: int) -> None:
        self.note("killed")
        victim = self.workers[place]
        victim.kill()
        victim.wait()
        self.gone.append(Gone(str(victim.pid), time.monotonic()))
        self.workers[place] = self._start(place)

    def replace(self, place: int) -> None:
        """An orderly end, while another takes over."""
        self.note("replaced")
        leaver, self.workers[place] = self.workers[place], self._start(place)
        leaver.send_signal(signal.SIGTERM)
        # One that had hardly begun has not learnt to stop in an orderly way.
        assert leaver.wait(40) in (0, -signal.SIGTERM)

    async def freeze(self, place: int, seconds: float) -> None:
        self.note("frozen")
        worker = self.workers[place]
        worker.send_signal(signal.SIGSTOP)
        # It may go on for a moment; from here on it does not.
        await asyncio.to_thread(os.waitid, os.P_PID, worker.pid, os.WSTOPPED)
        at = time.monotonic()
        try:
            # The absence that is the test: nothing else can show that it is long enough.
            await asyncio.sleep(seconds)
        finally:
            # Also when the troubles end in the middle of it.
            self.gone.append(Gone(str(worker.pid), at, time.monotonic()))
            worker.send_signal(signal.SIGCONT)

    def stop(self) -> list[int]:
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(60) for worker in self.workers]
        self._log.close()
        return codes


async def enqueue(app: Penstock, chance: random.Random, counts: dict[str, int], acknowledged: list[Event]) -> None:
    """Enqueue a batch until it is acknowledged, with the same ids."""
    batch = []
    for _ in range(chance.randrange(1, 25)):
        key = f"k{min(int(chance.expovariate(0.15)), KEYS - 1)}"
        n = counts.get(key, 0)
        counts[key] = n + 1
        data = {"n": n, "sleep_s": chance.choice([0, 0.001, 0.01, 0.05]), "failures": chance.choice([0] * 12 + [1, 2])}
        batch.append(NewJob(data, id=uuid.UUID(int=chance.getrandbits(128), version=4), key=key))
    while True:
        try:
            receipts = await app.enqueue_many("keyed", batch)
            break
        except PenstockError:
            await asyncio.sleep(0.05)
    acknowledged += [Event("enqueued", str(receipt.id), "keyed", time.monotonic()) for receipt in receipts]


@pytest.mark.chaos
async def test_keys_keep_their_order_whatever_happens_to_workers(url: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    chance = random.Random(seed)
    history = tmp_path / "history.jsonl"
    history.touch()
    acknowledged: list[Event] = []
    counts: dict[str, int] = {}
    async with Proxy(url) as proxy, Penstock(url, settings=Settings()) as app:
        fleet = Fleet(url, proxy.url, history)
        troubles: list[asyncio.Task[Any]] = []
        try:
            await eventually(lambda: present(app, fleet), "the workers", timeout=60)

            async def cut() -> None:
                fleet.note("cut off")
                proxy.cut()
                await asyncio.sleep(chance.uniform(2, 7))
                proxy.mend()

            async def trouble() -> None:
                while True:
                    await asyncio.sleep(chance.uniform(0.5, 3))
                    kind = chance.choice(["kill", "freeze", "cut", "replace"])
                    if kind == "kill":
                        fleet.kill(chance.randrange(1, 4))
                    elif kind == "freeze":
                        await fleet.freeze(chance.randrange(1, 4), chance.choice([0.5, 2.0, 6.0]))
                    elif kind == "replace":
                        await asyncio.to_thread(fleet.replace, chance.randrange(1, 4))
                    else:
                        await cut()

            wanted = {f"s{n}" for n in range(12)}
            await app.pool("standing", slots=16).reconcile(dict.fromkeys(wanted, 1))
            troubles.append(asyncio.create_task(trouble()))
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                await enqueue(app, chance, counts, acknowledged)
                await asyncio.sleep(chance.uniform(0, 0.15))
                if troubles[0].done():
                    troubles[0].result()
            troubles[0].cancel()
            await asyncio.gather(*troubles, return_exceptions=True)
            proxy.mend()
            for worker in fleet.workers:
                worker.send_signal(signal.SIGCONT)

            async def drained() -> bool:
                with suppress(PenstockError):
                    return all(c.ready + c.deferred + c.in_progress == 0 for c in await app.counts())
                return False

            await eventually(drained, "the drain", timeout=120)
            await eventually(lambda: present(app, fleet), "the return of all workers", timeout=60)
            await eventually(lambda: all_stand(app, wanted), "the standing jobs", timeout=60)
            until = time.monotonic()
            codes = await asyncio.to_thread(fleet.stop)
            final = await rows(app)
            database = await app.database()
            ended = await database.fetch(
                "select key || '/' || (data ->> 'n') as name, attempts, status from penstock.archived_jobs"
            )
            succeeded = {row["name"]: row["attempts"] for row in ended if row["status"] == "succeeded"}
            failed = {row["name"] for row in ended if row["status"] == "failed"}
            killed = {gone.worker: gone.at for gone in fleet.gone}
            events = read(history)
            keyed = [event for event in events if event.kind in ("started", "ended")]
            violations = check(
                acknowledged + [replace(event, name="keyed") for event in keyed], final, {"keyed": Rules()}, killed
            )
            violations += check_keys(keyed, fleet.gone, succeeded, failed, within_s=15)
            violations += check_standing(events, fleet.gone, wanted, until, within_s=15)
            assert violations == [], "\n".join([*violations[:20], *map(str, fleet.gone)])
            assert codes == [0] * 4
            assert await database.fetchval("select count(*) from penstock.leases") == 0
            assert await database.fetchval("select count(*) from penstock.members") == 0
            print(f"{len(final)} jobs of {len(counts)} keys, {fleet.what_happened}, failed {len(failed)}")
        finally:
            for task in troubles:
                task.cancel()
            for worker in fleet.workers:
                worker.kill()
                worker.wait()


async def all_stand(app: Penstock, wanted: set[str]) -> bool:
    database = await app.database()
    running = await database.fetch("select key from penstock.standing_jobs where running_by is not null")
    return {row["key"] for row in running} == wanted


async def present(app: Penstock, fleet: Fleet) -> bool:
    """Whether the workers of the fleet, and nobody else, are members. An id is host.pid.random."""
    database = await app.database()
    members = await database.fetch("select group_name, id from penstock.members")
    here = {(row["group_name"], row["id"].rsplit(".", 2)[1]) for row in members}
    return here == {(group, str(worker.pid)) for worker in fleet.workers for group in ("keyed", "standing")}
