"""Servers, dequeuers and PostgreSQL are killed under load; the checker judges what the service and the client recorded."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import DatabaseUnavailable, NewJob, Penstock, PenstockError
from penstock.client import AsyncClient
from penstock.postgres.embedded import EmbeddedServer
from tests.checker.history import Event, Gone
from tests.checker.jobs import History, Rules, check_jobs
from tests.checker.noted import NOTE, notes
from tests.checker.tables import clock_difference, finals
from tests.http.http_server import free_port
from tests.waiting import eventually

RULES = {"plain": Rules(max_attempts=30), "once": Rules(at_most_once=True), "limited": Rules(concurrency=3, max_attempts=30)}
SECONDS = 25.0
PLACES = 100  # connections of a dequeuer to the service
TOKEN = "token-of-the-chaos"
SERVICE = Path(__file__).parents[1] / "http" / "downstream_service.py"
QUICK = {
    "PENSTOCK_HEARTBEAT_INTERVAL": "0.5",
    "PENSTOCK_DEAD_AFTER": "2",
    "PENSTOCK_MAINTENANCE_INTERVAL": "0.3",
    "PENSTOCK_COMMAND_TIMEOUT": "5",
    "PENSTOCK_DOWNSTREAM_TIMEOUT_S": "2",
}


class Site:
    """One server, two dequeuers, one downstream service."""

    def __init__(self, url: str, folder: Path) -> None:
        self.base_url = f"http://127.0.0.1:{free_port()}"
        service_port = free_port()
        self.history = folder / "history.jsonl"
        self.history.touch()
        self._log = (folder / "log").open("ab")
        self._environment = {
            **os.environ,
            **QUICK,
            "PENSTOCK_DATABASE_URL": url,
            "PENSTOCK_HTTP_TOKEN": TOKEN,
            "DOWNSTREAM_URL": f"http://127.0.0.1:{service_port}",
            "DOWNSTREAM_WORKER_AUTH": "x",
        }
        arguments = [str(service_port), self.base_url, TOKEN, str(self.history)]
        self.service = subprocess.Popen([sys.executable, str(SERVICE), *arguments], stdout=subprocess.DEVNULL, stderr=self._log)
        port = self.base_url.rpartition(":")[2]
        self._commands = [["server", "--port", port], ["dequeue"], ["dequeue"]]
        self.processes = [self._start(command) for command in self._commands]
        self.gone: list[Gone] = []

    @property
    def kills(self) -> int:
        """The number of processes that were killed."""
        return len(self.gone)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, "-m", "penstock", *command]
        return subprocess.Popen(arguments, env=self._environment, stdout=self._log, stderr=self._log)

    def kill_one(self, chance: random.Random) -> None:
        place = chance.randrange(3)
        self.processes[place].kill()
        self.processes[place].wait()
        self.gone.append(Gone(str(self.processes[place].pid), time.monotonic()))
        self.processes[place] = self._start(self._commands[place])

    def events(self) -> list[dict[str, Any]]:
        found = []
        for line in self.history.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def close(self) -> None:
        for process in [*self.processes, self.service]:
            process.kill()
            process.wait()
        self._log.close()


def attempts_of(name: str) -> int:
    return 1 if RULES[name].at_most_once else RULES[name].max_attempts


async def enqueue(client: AsyncClient, chance: random.Random, acknowledged: list[Event]) -> None:
    """Enqueue single jobs and batches, each until it is acknowledged."""
    name = chance.choices(list(RULES), weights=[5, 2, 1])[0]
    act = chance.choice(["succeed", "succeed", "succeed", "fail", "twice", "stale", "first"])
    data = {"sleep_s": chance.choice([0, 0, 0.02, 0.2]), "act": "succeed" if name == "limited" else act}
    ids = [uuid.UUID(int=chance.getrandbits(128), version=4) for _ in range(chance.choice([1, 1, 5]))]
    while True:
        try:
            if len(ids) == 1:
                await client.enqueue(name, data, id=ids[0])
            else:
                await client.enqueue_many(name, [NewJob(data, id) for id in ids])
            break
        except DatabaseUnavailable:
            await asyncio.sleep(0.05)
    acknowledged += [Event("enqueued", str(id), name, time.monotonic()) for id in ids]


@pytest.mark.chaos
@pytest.mark.timeout(400)
async def test_promises_hold_while_servers_and_dequeuers_are_killed(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    chance = random.Random(seed)
    server = EmbeddedServer(tmp_path / "server")
    url = await asyncio.to_thread(server.start)
    app = Penstock(url)
    await app.migrate()
    database = await app.database()
    connection = await database.connect()
    await connection.execute(NOTE)
    await connection.close()
    site = Site(url, tmp_path)
    client = AsyncClient(site.base_url, "admin", TOKEN, timeout_s=10)
    acknowledged: list[Event] = []
    try:
        for name, rule in RULES.items():
            strategy = "at_most_once" if rule.at_most_once else "at_least_once"
            options = {"max_attempts": attempts_of(name), "time_limit": 6, "backoff_base": 0.05, "backoff_cap": 0.3}
            await eventually_created(client, name, delivery_strategy=strategy, concurrency=rule.concurrency, **options)
        until = time.monotonic() + SECONDS
        next_kill = time.monotonic() + 3
        server_kill_at = time.monotonic() + SECONDS / 2
        # The load ends only after a number of kills: on a busy machine a server starts slowly, and nothing is enqueued meanwhile.
        while time.monotonic() < until or site.kills < 3 or server_kill_at < float("inf"):
            await asyncio.gather(*(enqueue(client, chance, acknowledged) for _ in range(4)))
            if time.monotonic() > next_kill:
                site.kill_one(chance)
                next_kill = time.monotonic() + chance.uniform(1, 3)
            if time.monotonic() > server_kill_at:
                os.kill(int((tmp_path / "server/postgres/postmaster.pid").read_text().split()[0]), signal.SIGKILL)
                server_kill_at = float("inf")
            await asyncio.sleep(chance.uniform(0, 0.05))

        async def drained() -> bool:
            with suppress(PenstockError):
                return all(c.ready + c.deferred + c.in_progress == 0 for c in await app.counts())
            return False

        await eventually(drained, "the drain", timeout=200)
        # A job runs in the service, whichever dequeuer sent it; the service knows the attempts that are left.
        final = [replace(row, worker="") for row in await finals(app)]
        seen = site.events()
        plain = [
            Event(
                **{name: value for name, value in event.items() if name != "attempts"},
                attempt=attempts_of(event["name"]) - event["attempts"] + 1,
            )
            for event in seen
            if event["kind"] in ("started", "ended")
        ]
        # A job of the service counts as done when its callback was accepted, also when only the answer was lost.
        names = {row.id: row.name for row in final}
        heard = {(event["id"], event["attempts"]) for event in seen if event["kind"] == "answer" and event["outcome"] == "200"}
        heard = {(id, attempts_of(names[id]) - left + 1) for id, left in heard}
        heard |= {(row.id, row.attempt) for row in final if row.status == "succeeded"}
        plain = [
            replace(event, outcome="interrupted") if event.kind == "ended" and (event.id, event.attempt) not in heard else event
            for event in plain
        ]
        # Only the dequeuer knows whether it has sent a job that it had marked as begun: if it is killed then, the attempt counts.
        noted = await notes(database, await clock_difference(database))
        marks = [Event("begun", note.id, note.name, note.at, note.number, note.worker) for note in noted if note.what == "begun"]
        history = History(acknowledged + plain + marks, final, RULES, site.gone, places=PLACES)
        violations = check_jobs(history)
        accepted = {event["id"]: event["at"] for event in seen if event["kind"] == "answer" and event["outcome"] == "200"}
        ended = {row.id for row in final if row.status == "succeeded"}
        for event in plain:
            if event.kind == "started" and event.id in ended and event.at > accepted.get(event.id, float("inf")):
                violations.append(f"{event.id} was started after its callback was accepted")
        # An attempt number that the service has received is never sent again.
        given = Counter((event["id"], event["attempts"]) for event in seen if event["kind"] == "started")
        violations += [f"{id} was sent {times} times with attempts {left}" for (id, left), times in given.items() if times > 1]
        assert violations == [], "\n".join(violations[:20])
        assert site.kills >= 3
        assert server_kill_at == float("inf")
        assert {row.status for row in final} >= {"succeeded", "failed"}
        print(f"{len(final)} jobs, {site.kills} kills")
    finally:
        site.close()
        await client.close()
        await app.close()
        await asyncio.to_thread(server.stop)


async def eventually_created(client: AsyncClient, name: str, **options: Any) -> None:
    async def created() -> bool:
        with suppress(PenstockError):
            await client.create_job_type(name, **options)
        with suppress(PenstockError):
            return name in {record.name for record in await client.job_types()}
        return False

    await eventually(created, f"the type {name}", timeout=60)
