"""Real worker processes and a real server, killed at random while a random workload runs; then the checker decides."""

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
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from history import Event, Final, Rules, check, healing, read

from conftest import eventually
from penstock import NewJob, Penstock, PenstockError
from penstock.postgres.database import Database
from penstock.postgres.embedded import EmbeddedServer
from penstock.settings import Settings

RULES = {
    "plain": Rules(),
    "once": Rules(at_most_once=True),
    "limited": Rules(concurrency=3),
    "brief": Rules(),
    "unhurried": Rules(),
}
WORKERS = 4
SECONDS = float(os.environ.get("CHAOS_SECONDS", "25"))
# Dead after 2 s of silence, looked for every 0.3 s, up to 0.2 s of backoff; the server is away for a few seconds once, and a job
# waits for its turn, on a machine that starts Python processes all the time.
HEALED_WITHIN = 15.0


class Fleet:
    """Worker processes, as an operator would run them."""

    def __init__(self, url: str, history: Path) -> None:
        self.killed: dict[str, float] = {}
        self._environment = {
            **os.environ,
            "PENSTOCK_DATABASE_URL": url,
            "CHAOS_HISTORY": str(history),
            "PENSTOCK_HEARTBEAT_INTERVAL": "0.5",
            "PENSTOCK_DEAD_AFTER": "2",
            "PENSTOCK_CARE_INTERVAL": "0.3",
        }
        self._log = history.with_suffix(".log").open("ab")
        self.workers = [self._start() for _ in range(WORKERS)]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock", "worker", "workload:app", "--concurrency", "10"]
        return subprocess.Popen(command, env=self._environment, cwd=Path(__file__).parent, stdout=self._log, stderr=self._log)

    def kill_one(self, chance: random.Random) -> None:
        place = chance.randrange(WORKERS)
        victim = self.workers[place]
        victim.kill()
        victim.wait()
        self.killed[str(victim.pid)] = time.monotonic()
        self.workers[place] = self._start()

    def stop(self) -> list[int]:
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(60) for worker in self.workers]
        self._log.close()
        return codes


def payload(chance: random.Random) -> dict[str, Any]:
    return {"sleep_s": chance.choice([0, 0, 0.01, 0.05, 0.3]), "failures": chance.choice([0, 0, 0, 1, 2])}


async def enqueue(app: Penstock, chance: random.Random, acknowledged: list[Event], known: list[Any]) -> None:
    """Enqueue a batch until it is acknowledged; sometimes again, sometimes ids that were there before."""
    name = chance.choices(list(RULES), weights=[5, 3, 1, 3, 0])[0]
    expires_at = timedelta(seconds=chance.choice([0.2, 5])) if name == "brief" else None
    batch = [
        NewJob(
            payload(chance),
            id=chance.choice(known) if known and chance.random() < 0.1 else uuid.UUID(int=chance.getrandbits(128), version=4),
            priority=chance.choice([0, 0, -5, 5]),
            run_after=chance.choice([None, None, timedelta(seconds=0.5)]),
            expires_at=expires_at,
        )
        for _ in range(chance.randrange(1, 40))
    ]
    for _ in range(chance.choice([1, 1, 2])):
        while True:
            try:
                receipts = await app.enqueue_many(name, batch)
                break
            except PenstockError:
                await asyncio.sleep(0.05)
        for receipt in receipts:
            if receipt.id not in known:
                known.append(receipt.id)
                acknowledged.append(Event("enqueued", str(receipt.id), name, time.monotonic()))


@pytest.mark.chaos
async def test_promises_hold_while_workers_and_the_server_are_killed(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    chance = random.Random(seed)
    history = tmp_path / "history.jsonl"
    history.touch()
    server = EmbeddedServer(tmp_path / "server")
    url = await asyncio.to_thread(server.start)
    migrating = Penstock(url)
    await migrating.migrate()
    app = Penstock(url, settings=Settings(command_timeout=timedelta(seconds=5)))
    fleet = Fleet(url, history)
    acknowledged: list[Event] = []
    known: list[Any] = []
    try:
        await declared(app)
        until = time.monotonic() + SECONDS
        next_kill = time.monotonic() + 4
        server_kill_at = time.monotonic() + SECONDS / 2
        while time.monotonic() < until:
            await enqueue(app, chance, acknowledged, known)
            if chance.random() < 0.2:
                with suppress(PenstockError):
                    await app.cancel(chance.choice(known))
            if chance.random() < 0.1:
                with suppress(PenstockError):
                    copy = await app.replay(chance.choice(known))
                    known.append(copy.id)
            if time.monotonic() > next_kill:
                fleet.kill_one(chance)
                next_kill = time.monotonic() + chance.uniform(1, 4)
            if time.monotonic() > server_kill_at:
                os.kill(int((tmp_path / "server/postgres/postmaster.pid").read_text().split()[0]), signal.SIGKILL)
                server_kill_at = float("inf")
            await asyncio.sleep(chance.uniform(0, 0.1))
        assert server_kill_at == float("inf")

        async def drained() -> bool:
            with suppress(PenstockError):
                return all(c.ready + c.deferred + c.in_progress == 0 for c in await app.counts())
            return False

        async def all_started() -> bool:
            with suppress(PenstockError):
                found = await (await app.database()).fetch("select pid from penstock.workers")
                return {worker.pid for worker in fleet.workers} <= {row["pid"] for row in found}
            return False

        await eventually(drained, "the drain", timeout=120)
        # One that was started last may not know yet what a signal is to do.
        await eventually(all_started, "the start of all workers", timeout=60)
        codes = fleet.stop()
        final = await rows(app)
        events = acknowledged + read(history)
        violations = check(events, final, RULES, fleet.killed, healed_within=HEALED_WITHIN)
        assert violations == [], "\n".join(violations[:20])
        assert codes == [0] * WORKERS
        statuses = {row.status for row in final}
        assert {"succeeded", "failed", "expired", "cancelled"} <= statuses, f"a dull run: {statuses}"
        assert len(fleet.killed) >= 3
        database = await app.database()
        assert await database.fetchval("select count(*) from penstock.leases") == 0
        healed = sorted(healing(events, final, fleet.killed).values())
        assert healed, "no worker was killed while it ran jobs"
        print(f"{len(final)} jobs, {len(fleet.killed)} workers killed; {len(healed)} of their jobs were healed")
        print(f"within {healed[len(healed) // 2]:.1f} s in the middle, {healed[-1]:.1f} s at most")
    finally:
        for worker in fleet.workers:
            worker.kill()
            worker.wait()
        await app.close()
        await migrating.close()
        await asyncio.to_thread(server.stop)


async def declared(app: Penstock) -> None:
    async def types() -> bool:
        return set(RULES) <= {record.name for record in await app.job_types()}

    await eventually(types, "the declaration of the types", timeout=60)


async def rows(app: Penstock) -> list[Final]:
    database: Database = await app.database()
    found = await database.fetch(
        "select id, name, status::text, attempts, false as finished, 0.0::float8 as ago from penstock.queued_jobs"
        " union all select id, name, status::text, attempts, true,"
        " extract(epoch from clock_timestamp() - finished_at)::float8 from penstock.archived_jobs"
    )
    now = time.monotonic()
    return [Final(str(r["id"]), r["name"], r["status"], r["attempts"], r["finished"], now - r["ago"]) for r in found]
