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
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock import DatabaseUnavailable, NewJob, Penstock, PenstockError
from penstock.client import AsyncClient
from penstock.postgres.database import Database
from penstock.postgres.embedded import EmbeddedServer
from tests.chaos.sabotage import Edit, Sabotage
from tests.chaos.seeking import found_out
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
# Jobs of the arranged crash, which the service has received and forgotten.
FORGOTTEN = 20
SABOTAGES = {
    "starts are not recorded": Sabotage(
        r"\S+ was sent [0-9]+ times with attempts", (Edit("begin_jobs", "set begun = true", "set begun = job.begun"),)
    ),
    "a number is sent again": Sabotage(
        r"\S+ was sent [0-9]+ times with attempts",
        # What a dispatcher had sent goes back as if it had not been.
        (Edit("end_attempts", r"not locked\.begun", "(not locked.begun or holder.kind = 'dispatcher')"),),
    ),
    "a stale number is accepted": Sabotage(
        r"\S+ was accepted with attempts [0-9]+, with which it was never sent",
        (Edit("settle_attempts", r"where job\.attempts_left = p_attempts_left\[job\.place\]", "where true"),),
    ),
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
        self.kill(chance.randrange(3))

    def kill(self, place: int) -> None:
        """Kill the server (0) or a dequeuer (1, 2), and start another in its place."""
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
    await put(client, name, data, ids, acknowledged)


async def put(client: AsyncClient, name: str, data: dict[str, Any], ids: list[uuid.UUID], acknowledged: list[Event]) -> None:
    """Enqueue one job or a batch, until it is acknowledged."""
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


class Load:
    """The requests of the clients, and what was acknowledged.

    Args:
        site: The site.
        client: A client of its server.
        chance: Random numbers.
    """

    def __init__(self, site: Site, client: AsyncClient, chance: random.Random) -> None:
        self.acknowledged: list[Event] = []
        self._site = site
        self._client = client
        self._chance = chance

    async def step(self) -> None:
        """Enqueue some jobs."""
        await asyncio.gather(*(enqueue(self._client, self._chance, self.acknowledged) for _ in range(4)))
        # A pause of the load: there is nothing to wait for.
        await asyncio.sleep(self._chance.uniform(0, 0.05))

    async def through_kills(self, postmaster: Path) -> None:
        """Enqueue for a while, in which processes and PostgreSQL are killed at random; then arrange a crash of the dequeuers."""
        until = time.monotonic() + SECONDS
        next_kill = time.monotonic() + 3
        server_kill_at = time.monotonic() + SECONDS / 2
        # The load ends only after a number of kills: on a busy machine a server starts slowly, and nothing is enqueued meanwhile.
        while time.monotonic() < until or self._site.kills < 3 or server_kill_at < float("inf"):
            await self.step()
            if time.monotonic() > next_kill:
                self._site.kill_one(self._chance)
                next_kill = time.monotonic() + self._chance.uniform(1, 3)
            if time.monotonic() > server_kill_at:
                os.kill(int(postmaster.read_text().split()[0]), signal.SIGKILL)
                server_kill_at = float("inf")
        await self._crash()

    async def through_a_crash(self) -> None:
        """Enqueue for a moment, and kill the dequeuers while the service has jobs of theirs."""
        for _ in range(20):
            await self.step()
        await self._crash()

    async def _crash(self) -> None:
        """Kill both dequeuers when the service has received jobs of theirs and forgotten them, so that they wait for these."""
        ids = [uuid.UUID(int=self._chance.getrandbits(128), version=4) for _ in range(FORGOTTEN)]
        await put(self._client, "plain", {"sleep_s": 0, "act": "forget", "times": 1}, ids, self.acknowledged)

        def sent() -> bool:
            return {str(id) for id in ids} <= {event["id"] for event in self._site.events() if event["kind"] == "started"}

        await eventually(sent, "the jobs in the service")
        for place in (1, 2):
            self._site.kill(place)


async def run(folder: Path, *, arranged: bool = False, sabotage: Sabotage | None = None) -> list[str]:
    """Run the site under load through kills at random, or through the arranged crash, and check the history."""
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    chance = random.Random(seed)
    server = EmbeddedServer(folder / "server")
    url = await asyncio.to_thread(server.start)
    app = Penstock(url)
    await app.migrate()
    database = await app.database()
    connection = await database.connect()
    await connection.execute(NOTE)
    await connection.close()
    if sabotage is not None:
        await sabotage.prepare(app)
    site = Site(url, folder)
    client = AsyncClient(site.base_url, "admin", TOKEN, timeout=timedelta(seconds=10))
    load = Load(site, client, chance)
    try:
        for name, rule in RULES.items():
            strategy = "at_most_once" if rule.at_most_once else "at_least_once"
            options = {"max_attempts": attempts_of(name), "time_limit": 6, "backoff_base": 0.05, "backoff_cap": 0.3}
            if arranged:
                # Only the crash ends the attempts that the service has forgotten.
                options["time_limit"] = 60
            await eventually_created(client, name, delivery_strategy=strategy, concurrency=rule.concurrency, **options)
        await (load.through_a_crash() if arranged else load.through_kills(folder / "server/postgres/postmaster.pid"))

        async def drained() -> bool:
            with suppress(PenstockError):
                return all(c.ready + c.deferred + c.in_progress == 0 for c in await app.counts())
            return False

        await eventually(drained, "the drain", timeout=200)
        violations, statuses = await check(app, database, site, load.acknowledged)
        assert arranged or statuses >= {"succeeded", "failed"}
        print(f"{len(load.acknowledged)} jobs, {site.kills} kills")
        return violations
    finally:
        site.close()
        await client.close()
        await app.close()
        await asyncio.to_thread(server.stop)


async def check(app: Penstock, database: Database, site: Site, acknowledged: list[Event]) -> tuple[list[str], set[str]]:
    """The violations, and the statuses with which jobs ended."""
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
    accepted = [event for event in seen if event["kind"] == "answer" and event["outcome"] == "200"]
    heard = {(event["id"], attempts_of(names[event["id"]]) - event["attempts"] + 1) for event in accepted}
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
    accepted_at = {event["id"]: event["at"] for event in accepted}
    ended = {row.id for row in final if row.status == "succeeded"}
    for event in plain:
        if event.kind == "started" and event.id in ended and event.at > accepted_at.get(event.id, float("inf")):
            violations.append(f"{event.id} was started after its callback was accepted")
    # An attempt number that the service has received is never sent again, and no other one is accepted.
    given = Counter((event["id"], event["attempts"]) for event in seen if event["kind"] == "request")
    violations += [f"{id} was sent {times} times with attempts {left}" for (id, left), times in given.items() if times > 1]
    violations += [
        f"{event['id']} was accepted with attempts {event['attempts']}, with which it was never sent"
        for event in accepted
        if (event["id"], event["attempts"]) not in given
    ]
    return violations, {row.status for row in final}


@pytest.mark.chaos
@pytest.mark.timeout(400)
async def test_promises_hold_while_servers_and_dequeuers_are_killed(tmp_path: Path) -> None:
    violations = await run(tmp_path)
    assert violations == [], "\n".join(violations[:20])


@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_what_the_service_has_received_comes_again_under_another_number(tmp_path: Path) -> None:
    violations = await run(tmp_path, arranged=True)
    assert violations == [], "\n".join(violations[:20])


@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sabotage", SABOTAGES.values(), ids=SABOTAGES)
async def test_numbers_without_a_guarantee_are_found_out(tmp_path: Path, sabotage: Sabotage) -> None:
    await found_out(sabotage.expected, tmp_path, lambda folder: run(folder, arranged=True, sabotage=sabotage))


async def eventually_created(client: AsyncClient, name: str, **options: Any) -> None:
    async def created() -> bool:
        with suppress(PenstockError):
            await client.create_job_type(name, **options)
        with suppress(PenstockError):
            return name in {record.name for record in await client.job_types()}
        return False

    await eventually(created, f"the type {name}", timeout=60)
