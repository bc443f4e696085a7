"""The downstream worker against a real service process that misbehaves in every way that services do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from penstock.testing import TemporaryDatabases
from tests.http.http_calls import put
from tests.http.http_server import TOKEN, Served, free_port, serving
from tests.waiting import eventually, until

HERE = Path(__file__).parent
QUICK = {"PENSTOCK_HEARTBEAT_INTERVAL": "0.5", "PENSTOCK_DEAD_AFTER": "2", "PENSTOCK_MAINTENANCE_INTERVAL": "0.2"}


class Site:
    """A server, a downstream service, and dequeuers."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served = served
        self.client = served.client()
        self.port = free_port()
        self.history = folder / "history.jsonl"
        self.log = folder / "dequeue.log"
        self.history.touch()
        self.service: subprocess.Popen[str] | None = None
        self.dequeuers: list[subprocess.Popen[bytes]] = []
        self.types = 0

    def start_service(self) -> None:
        arguments = [str(self.port), self.served.base_url, TOKEN, str(self.history)]
        self.service = subprocess.Popen(
            [sys.executable, str(HERE / "downstream_service.py"), *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.service.stdout is not None
        assert self.service.stdout.readline() == "ready\n"

    def kill_service(self) -> None:
        if self.service is not None:
            self.service.kill()
            self.service.communicate()
            self.service = None

    def start_dequeuer(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        log = self.log.open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "dequeue", *arguments],
            env={
                **os.environ,
                **QUICK,
                "DATABASE_URL": self.served.database_url,
                "DOWNSTREAM_URL": f"http://127.0.0.1:{self.port}",
                "DOWNSTREAM_WORKER_AUTH": "hymanrickover",
                "PENSTOCK_DOWNSTREAM_TIMEOUT_S": "1.5",
                **environment,
            },
            stdout=log,
            stderr=log,
        )
        self.dequeuers.append(process)
        return process

    def type(self, **options: Any) -> str:
        self.types += 1
        name = f"type-{self.types}-{time.monotonic_ns()}"
        body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 50}
        body |= {"backoff_base_s": 0.1, "backoff_cap_s": 0.2, "time_limit_s": 20, **options}
        response = self.client.post("/v1/jobs", json=body)
        assert response.status_code == 201, response.text
        return name

    def events(self, id: str, *kinds: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.history.read_text().splitlines()]
        return [event for event in found if event["id"] == id.removeprefix("job_") and event["kind"] in kinds]

    def finished(self, id: str, wait: str = "30s") -> dict[str, Any]:
        job: dict[str, Any] = self.client.get(f"/v1/jobs/{id}", params={"wait": wait, "details": True}).json()
        return job

    def run(self, name: str, **data: Any) -> dict[str, Any]:
        return self.finished(put(self.client, name, data=data)["id"])

    def close(self) -> None:
        for dequeuer in self.dequeuers:
            dequeuer.kill()
            dequeuer.wait()
        self.kill_service()
        self.client.close()


@pytest.fixture(scope="module")
def site(databases: TemporaryDatabases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with databases.database() as url, serving(url) as served:
        site = Site(served, tmp_path_factory.mktemp("site"))
        try:
            site.start_service()
            site.start_dequeuer()
            yield site
        finally:
            site.close()


@pytest.fixture
def own_site(url: str, tmp_path: Path) -> Iterator[Site]:
    """One that a test may take apart."""
    with serving(url) as served:
        site = Site(served, tmp_path)
        try:
            yield site
        finally:
            site.close()


def test_a_job_reaches_the_service_and_its_callback_ends_it(site: Site) -> None:
    name = site.type()
    job = site.run(name, shipmentId="shp_123", number=12345678901234567890123)
    assert (job["status"], job["attempts"]) == ("succeeded", 3)
    (request,) = site.events(job["id"], "request")
    assert request["body"] == {
        "data": {"shipmentId": "shp_123", "number": 12345678901234567890123},
        "id": job["id"],
        "attempts": 3,
    }
    headers = request["headers"]
    assert headers["Authorization"] == "Basic am9iczpoeW1hbnJpY2tvdmVy"  # jobs:hymanrickover
    assert headers["Accept"] == headers["Content-Type"] == "application/json"
    assert headers["User-Agent"].startswith("penstock/")


def test_a_callback_is_noticed_at_once(site: Site) -> None:
    name = site.type(concurrency=1)
    site.run(name)
    # One after the other: were callbacks found by polling only, the last one would have to wait for two hundred seconds.
    last = [put(site.client, name, data={})["id"] for _ in range(100)][-1]
    assert "succeeded" in (site.finished(last, "25s")["status"] for _ in range(4))


def test_a_name_is_quoted_in_the_path(site: Site) -> None:
    name = f"a%b?c#d&ü-{time.monotonic_ns()}"
    body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 1, "concurrency": 5}
    assert site.client.post("/v1/jobs", json=body).status_code == 201
    path = f"/v1/jobs/{quote(name, safe='')}/random_id"
    id = site.client.put(path, json={"data": {"act": "refuse", "retryable": False}}).json()["id"]
    assert site.finished(id)["errors"][0]["message"].endswith("No such shipment")
    assert site.events(id, "request")[0]["name"] == name


def test_a_failure_is_retried_and_the_last_one_is_final(site: Site) -> None:
    job = site.run(site.type(), act="fail")
    assert (job["status"], job["attempts"], len(job["errors"])) == ("failed", 0, 3)
    assert [event["attempts"] for event in site.events(job["id"], "request")] == [3, 2, 1]


def test_a_job_can_succeed_at_its_second_attempt(site: Site) -> None:
    job = site.run(site.type(), succeed_at=2)
    assert (job["status"], job["attempts"]) == ("succeeded", 2)


def test_the_failure_of_an_at_most_once_job_is_final(site: Site) -> None:
    job = site.run(site.type(delivery_strategy="at_most_once", attempts=1), act="fail")
    assert (job["status"], len(site.events(job["id"], "request"))) == ("failed", 1)


def test_a_service_that_is_busy_for_a_moment_is_asked_again(site: Site) -> None:
    job = site.run(site.type(), act="503", times=2)
    assert (job["status"], job["attempts"]) == ("succeeded", 3)
    assert len(site.events(job["id"], "request")) == 3


def test_a_service_that_stays_busy_fails_the_attempt(site: Site) -> None:
    job = site.run(site.type(attempts=1), act="503", times=99)
    assert (job["status"], job["errors"][0]["type"]) == ("failed", "Unavailable")
    assert len(site.events(job["id"], "request")) == 4


def test_an_error_fails_the_attempt(site: Site) -> None:
    job = site.run(site.type(), act="500", times=1)
    assert (job["status"], job["attempts"]) == ("succeeded", 2)
    assert job["errors"][0]["message"] == "the downstream service answered 500: Broken"


def test_a_late_answer_is_not_waited_for_and_does_not_fail_the_job(site: Site) -> None:
    job = site.run(site.type(), act="late", answer_s=4, sleep_s=2.5)
    assert (job["status"], job["attempts"]) == ("succeeded", 3)
    assert len(site.events(job["id"], "request")) == 1


@pytest.mark.parametrize("strategy", ["at_least_once", "at_most_once"])
def test_an_answer_that_is_lost_does_not_fail_the_job(site: Site, strategy: str) -> None:
    job = site.run(site.type(delivery_strategy=strategy, attempts=1), act="drop", sleep_s=0.5)
    assert job["status"] == "succeeded"
    # It may have been read: an attempt is not sent again.
    assert len(site.events(job["id"], "request")) == 1


def test_an_empty_answer_is_an_answer(site: Site) -> None:
    assert site.run(site.type(), act="empty")["attempts"] == 3


def test_a_callback_before_the_answer_counts(site: Site) -> None:
    job = site.run(site.type(), act="first")
    assert (job["status"], job["attempts"], job["errors"]) == ("succeeded", 3, [])


async def test_a_second_callback_is_refused(site: Site) -> None:
    job = site.run(site.type(), act="twice")
    answers = await eventually(lambda: len(found := site.events(job["id"], "answer")) == 2 and found, "both callbacks")
    assert [answer["outcome"][:3] for answer in answers] == ["200", "400"]
    assert "duplicate_status_request" in answers[1]["outcome"]
    assert (job["status"], job["attempts"]) == ("succeeded", 3)


async def test_a_stale_callback_is_refused(site: Site) -> None:
    job = site.run(site.type(), act="stale")
    answers = await eventually(lambda: len(found := site.events(job["id"], "answer")) == 3 and found, "the callbacks")
    assert ["decrement_failed" in answer["outcome"] for answer in answers] == [True, True, False]
    assert (job["status"], job["attempts"]) == ("succeeded", 3)


def test_a_job_without_callback_fails_when_its_time_is_over(site: Site) -> None:
    job = site.run(site.type(attempts=1, time_limit_s=1), act="forget")
    assert (job["status"], job["errors"][0]["type"]) == ("failed", "TimeLimit")


def test_a_notification_alone_is_no_callback(site: Site) -> None:
    """Every role that can connect to the database can send a notification; a trusted one would end the wait for the callback."""
    name = site.type(attempts=1, time_limit_s=3)
    id = put(site.client, name, data={"act": "forget"})["id"]
    until(lambda: site.events(id, "request"), "the request")

    async def forge() -> None:
        sql = await asyncpg.connect(site.served.database_url)
        try:
            role = f"anybody_{name.replace('-', '_')}"
            holders = await sql.fetch("select distinct worker from penstock.leases")
            async with sql.transaction():
                await sql.execute(f'create role "{role}"')
                await sql.execute(f'set local role "{role}"')
                for holder in holders:
                    for said in (f"settled {id.removeprefix('job_')}:1", "settled x", "settled x:y", "settled"):
                        await sql.execute("select pg_notify($1, $2)", f"penstock_{holder['worker']}", said)
                await sql.execute("reset role")
                await sql.execute(f'drop role "{role}"')
        finally:
            await sql.close()

    asyncio.run(forge())
    job = site.finished(id)
    assert (job["status"], job["errors"][0]["type"]) == ("failed", "TimeLimit")


def test_an_expired_job_is_not_sent(site: Site) -> None:
    name = site.type()
    id = put(site.client, name, data={}, expires_at="2020-01-01T00:00:00Z")["id"]
    assert site.finished(id)["status"] == "expired"
    assert site.events(id, "request") == []


def test_types_change_while_it_runs(site: Site) -> None:
    name = site.type()
    assert site.run(name)["status"] == "succeeded"
    site.client.post(f"/v1/jobs/{name}/pause")
    id = put(site.client, name, data={})["id"]
    assert site.finished(id, "1s")["status"] == "queued"
    site.client.post(f"/v1/jobs/{name}/resume")
    assert site.finished(id)["status"] == "succeeded"


def test_a_cancelled_job_is_given_up(site: Site) -> None:
    name = site.type()
    id = put(site.client, name, data={"act": "forget"})["id"]
    while not site.events(id, "request"):
        time.sleep(0.02)
    assert site.client.post(f"/v1/jobs/{id}/cancel").json()["status"] == "cancelling"
    assert site.finished(id)["status"] == "cancelled"


async def test_concurrency_holds_over_two_dequeuers(own_site: Site) -> None:
    own_site.start_service()
    for _ in range(2):
        own_site.start_dequeuer()
    name = own_site.type(concurrency=3)
    holders: set[str] = set()
    until = time.monotonic() + 60
    while len(holders) < 2:
        assert time.monotonic() < until, f"only {holders} took jobs"
        ids = [put(own_site.client, name, data={"sleep_s": 0.05})["id"] for _ in range(30)]
        for id in ids:
            assert own_site.finished(id)["status"] == "succeeded"
            holders.add(own_site.client.get(f"/v1/jobs/{id}?details=true").json()["worker"])
    in_flight = highest = 0
    for line in own_site.history.read_text().splitlines():
        kind = json.loads(line)["kind"]
        in_flight += {"started": 1, "ended": -1}.get(kind, 0)
        highest = max(highest, in_flight)
    assert highest == 3


def test_an_unreachable_service_fails_the_attempt(own_site: Site) -> None:
    own_site.start_dequeuer()
    job = own_site.run(own_site.type(attempts=2))
    assert (job["status"], [error["type"] for error in job["errors"]]) == ("failed", ["Unreachable", "Unreachable"])


@pytest.mark.parametrize("strategy", ["at_least_once", "at_most_once"])
async def test_a_type_that_hangs_takes_neither_the_connections_of_others_nor_the_time_of_its_own_jobs(
    own_site: Site, strategy: str
) -> None:
    own_site.start_service()
    more = {"delivery_strategy": strategy, "attempts": 1, "concurrency": 1000}
    hanging, other = own_site.type(time_limit_s=1, **more), own_site.type(**more)
    # The service answers after its caller gave up, so each request holds a connection for a second.
    ids = [put(own_site.client, hanging, data={"act": "late", "answer_s": 30, "sleep_s": 60})["id"] for _ in range(24)]
    own_site.start_dequeuer(HTTP_MAX_IDLE_CONNS="8")
    await eventually(lambda: any(own_site.events(id, "request") for id in ids), "the first request")
    assert own_site.run(other)["status"] == "succeeded"
    events = [json.loads(line) for line in own_site.history.read_text().splitlines()]
    sent = [event["name"] for event in events if event["kind"] == "request"]
    # Requests of the hanging type were waiting when the other's was sent.
    assert sent.index(other) < 20, sent
    for id in ids:
        assert own_site.finished(id, "60s")["status"] == "failed"
        (request,) = own_site.events(id, "request")
        assert request["body"]["attempts"] == 1


async def test_a_type_that_does_not_exist_is_named_and_worked_on_when_it_comes(own_site: Site) -> None:
    own_site.start_service()
    there = own_site.type()
    own_site.start_dequeuer("--type", there, "--type", "no-such", "--type", there[:-1])
    await eventually(lambda: "no_such_job_type" in own_site.log.read_text(), "the warning")
    warning = next(line for line in own_site.log.read_text().splitlines() if "no_such_job_type" in line)
    assert "no-such" in warning
    assert "did_you_mean" in warning and f"['{there}']" in warning
    assert own_site.run(there)["status"] == "succeeded"
    body = {"name": "no-such", "delivery_strategy": "at_least_once", "attempts": 1, "concurrency": 5}
    assert own_site.client.post("/v1/jobs", json=body).status_code == 201
    assert own_site.run("no-such")["status"] == "succeeded"


async def test_a_service_that_is_killed(own_site: Site) -> None:
    own_site.start_service()
    own_site.start_dequeuer()
    name = own_site.type(time_limit_s=1.5, attempts=20)
    ids = [put(own_site.client, name, data={"sleep_s": 0.3})["id"] for _ in range(20)]
    await eventually(lambda: own_site.events(ids[0], "started"), "the start")
    own_site.kill_service()
    own_site.start_service()
    assert {own_site.finished(id)["status"] for id in ids} == {"succeeded"}


async def test_a_dequeuer_that_stops_leaves_its_jobs_to_their_callbacks(own_site: Site) -> None:
    own_site.start_service()
    dequeuer = own_site.start_dequeuer(PENSTOCK_SHUTDOWN_GRACE="0.2")
    name = own_site.type()
    id = put(own_site.client, name, data={"sleep_s": 6})["id"]
    await eventually(lambda: own_site.events(id, "started"), "the start")
    dequeuer.send_signal(signal.SIGTERM)
    assert dequeuer.wait(20) == 0
    job = own_site.finished(id)
    assert (job["status"], job["attempts"], job["errors"]) == ("succeeded", 3, [])


def test_a_url_is_needed() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "DOWNSTREAM_URL"}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "dequeue"],
        env=environment | {"DATABASE_URL": "postgresql://127.0.0.1:1/none"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, "DOWNSTREAM_URL" in done.stderr) == (1, True)
