"""Workers over HTTP: the same leases and fences as in SQL."""

from __future__ import annotations

import re
import socket
import threading
import time
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest

from penstock import Penstock
from penstock.jobs import rates
from tests.http.http_calls import claim, new_id, put, settle, until_waiting
from tests.http.http_server import TOKEN, Served, serving
from tests.waiting import eventually


def worker_id() -> str:
    return f"w-{uuid4().hex[:8]}"


def test_a_job_is_claimed_and_settled(client: httpx.Client, echo: str) -> None:
    id = put(client, echo, data={"n": 1})["id"]
    (job,) = claim(client, echo)
    assert (job["id"], job["name"], job["attempt"], job["max_attempts"], job["data"]) == (id, echo, 1, 3, {"n": 1})
    assert job["lease_s"] == 420
    assert claim(client, echo) == []
    assert settle(client, echo, job) == "succeeded"
    assert client.get(f"/v1/jobs/{id}").json()["status"] == "succeeded"


@pytest.mark.parametrize(
    ("outcome", "fields", "becomes", "status", "attempt"),
    [
        ("failed", {"error": "broken"}, "retried", "queued", 2),
        ("failed", {"error": {"type": "Broken", "message": "x"}, "retry_after_s": 60}, "retried", "queued", 2),
        ("failed-for-good", {"error": "broken"}, "failed", "failed", 1),
        ("released", {}, "released", "queued", 1),
        ("cancelled", {}, "cancelled", "cancelled", 1),
        ("snoozed", {"retry_after_s": 60}, "snoozed", "queued", 1),
    ],
)
def test_each_outcome(
    client: httpx.Client, echo: str, outcome: str, fields: dict[str, Any], becomes: str, status: str, attempt: int
) -> None:
    id = put(client, echo)["id"]
    (job,) = claim(client, echo)
    assert settle(client, echo, job, outcome, **fields) == becomes
    stored = client.get(f"/v1/jobs/{id}?details=true").json()
    assert (stored["status"], stored["attempt"], stored["max_attempts"]) == (status, attempt, 3)
    assert bool(stored["errors"]) == ("error" in fields)


def test_a_job_is_not_snoozed_without_a_time(client: httpx.Client, echo: str) -> None:
    put(client, echo)
    (job,) = claim(client, echo)
    held = {"id": job["id"], "attempt": job["attempt"], "lease": job["lease"], "outcome": "snoozed"}
    refused = client.post(f"/v1/jobs/{echo}/settle", json={"jobs": [held]})
    assert (refused.status_code, "without a time" in refused.json()["title"]) == (400, True), refused.text


def test_a_job_has_options_of_its_own(client: httpx.Client, echo: str) -> None:
    id = put(client, echo, max_attempts=1, time_limit_s=2.5)["id"]
    plain = put(client, echo)["id"]
    lines = b'{"max_attempts": 2}\n{"time_limit_s": 4}\n{}\n'
    assert client.post(f"/v1/jobs/{echo}/batch", content=lines).status_code == 200
    claimed = claim(client, echo, limit=5)
    assert [(job["max_attempts"], job["time_limit_s"], job["snoozes"]) for job in claimed] == [
        (1, 2.5, 0), (3, None, 0), (2, None, 0), (3, 4.0, 0), (3, None, 0),
    ]  # fmt: skip
    assert settle(client, echo, claimed[0], "failed") == "failed"
    stored = [client.get(f"/v1/jobs/{one}?details=true").json() for one in (id, plain)]
    assert [(one["attempt"], one["max_attempts"], one["time_limit_s"]) for one in stored] == [(1, 1, 2.5), (1, 3, None)]


async def test_a_single_job_shows_its_log(client: httpx.Client, served: Served, echo: str) -> None:
    id = put(client, echo)["id"]
    (job,) = claim(client, echo)
    connection = await asyncpg.connect(served.database_url)
    try:
        append = "select penstock.append_log(array[$1::uuid], array[$2::bigint], array['one line'])"
        await connection.execute(append, id.removeprefix("job_"), job["lease"])
    finally:
        await connection.close()
    assert [line["line"] for line in client.get(f"/v1/jobs/{id}?details=true").json()["log"]] == ["one line"]
    assert settle(client, echo, job) == "succeeded"
    (line,) = client.get(f"/v1/jobs/{id}?details=true").json()["log"]
    assert (line["attempt"], line["line"]) == (1, "one line")
    assert client.get(f"/v1/archived-jobs?name={echo}&details=true").json()[0]["log"] == []


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"max_attempts": 40000}, {"time_limit_s": 0}, {"time_limit_s": 1e9}])
def test_options_that_no_job_can_have_are_refused(client: httpx.Client, echo: str, wrong: dict[str, Any]) -> None:
    refused = client.put(f"/v1/jobs/{echo}/random_id", json={"data": 1, **wrong})
    assert (refused.status_code, refused.json()["id"]) == (400, "invalid_parameter")
    refused = client.post(f"/v1/jobs/{echo}/batch", json={"data": 1, **wrong})
    assert f"Invalid {next(iter(wrong))}" in refused.text


@pytest.mark.parametrize("wrong", [{"attempt": 2}, {"lease": 1 << 40}, {"id": new_id()}])
def test_what_is_not_the_workers_is_stale(client: httpx.Client, echo: str, wrong: dict[str, Any]) -> None:
    id = put(client, echo)["id"]
    (job,) = claim(client, echo)
    assert settle(client, echo, job | wrong) == "stale"
    assert client.get(f"/v1/jobs/{id}").json()["status"] == "in-progress"


def test_a_job_of_another_type_is_stale(client: httpx.Client, echo: str) -> None:
    put(client, echo)
    (job,) = claim(client, echo)
    assert settle(client, "other", job) == "stale"


def test_a_lease_is_extended_and_fences_the_old_one(client: httpx.Client, echo: str) -> None:
    put(client, echo)
    (job,) = claim(client, echo)
    held = {"id": job["id"], "attempt": job["attempt"], "lease": job["lease"]}
    leases = client.post(f"/v1/jobs/{echo}/extend", json={"jobs": [held], "for_s": 600}).json()["leases"]
    assert leases[job["id"]] != job["lease"]
    # The answer may have been lost: the same call again gets a lease too, any other lease does not.
    again = client.post(f"/v1/jobs/{echo}/extend", json={"jobs": [held]}).json()["leases"]
    assert again[job["id"]] > leases[job["id"]]
    made_up = held | {"lease": job["lease"] + 100_000}
    assert client.post(f"/v1/jobs/{echo}/extend", json={"jobs": [made_up]}).json() == {"leases": {}}
    assert settle(client, echo, job) == "stale"
    leases = again
    assert settle(client, echo, job | {"lease": leases[job["id"]]}) == "succeeded"


def test_a_long_poll_gets_the_job_that_comes(client: httpx.Client, echo: str) -> None:
    found: list[Any] = []

    def poll() -> None:
        found.extend(claim(client, echo, wait="250s"))

    polling = threading.Thread(target=poll)
    polling.start()
    until_waiting(client, 1)
    id = put(client, echo)["id"]
    polling.join(60)
    assert [job["id"] for job in found] == [id]


def test_many_long_polls_share_what_comes(client: httpx.Client, echo: str) -> None:
    client.patch(f"/v1/jobs/{echo}", json={"concurrency": None})
    found: list[Any] = []
    polls = [threading.Thread(target=lambda: found.extend(claim(client, echo, wait="20s"))) for _ in range(8)]
    for poll in polls:
        poll.start()
    ids = {put(client, echo)["id"] for _ in range(8)}
    for poll in polls:
        poll.join(25)
    assert {job["id"] for job in found} == ids
    assert len(found) == 8


def test_a_long_poll_ends_empty(client: httpx.Client, echo: str) -> None:
    started = time.monotonic()
    assert claim(client, echo, wait="300ms") == []
    assert time.monotonic() - started >= 0.3


def test_a_deferred_job_is_claimed_when_it_is_due(client: httpx.Client, echo: str) -> None:
    id = put(client, echo)["id"]
    (job,) = claim(client, echo)
    settle(client, echo, job, "failed", retry_after_s=0.5)
    assert [job["id"] for job in claim(client, echo, wait="20s")] == [id]


def test_concurrency_holds(client: httpx.Client, echo: str) -> None:
    for _ in range(7):
        put(client, echo)
    assert len(claim(client, echo, limit=10)) == 5
    assert claim(client, echo, limit=10) == []


def test_the_first_heartbeat_registers_the_worker(client: httpx.Client, echo: str) -> None:
    worker = worker_id()
    beat = {"names": [echo], "in_flight": 2, "host": "here"}
    assert client.post(f"/v1/workers/{worker}/heartbeat", json=beat).json() == {"known": False, "cancelled": [], "leases": []}
    put(client, echo)
    (job,) = claim(client, echo, worker=worker)
    assert client.post(f"/v1/workers/{worker}/heartbeat", json=beat).json() == {
        "known": True,
        "cancelled": [],
        "leases": [job["lease"]],
    }
    listed = {one["id"]: one for one in client.get("/v1/workers").json()}
    assert (listed[worker]["names"], listed[worker]["in_flight"], listed[worker]["host"]) == ([echo], 2, "here")


def test_what_a_worker_holds_when_it_leaves_goes_to_others(client: httpx.Client, echo: str) -> None:
    worker = worker_id()
    client.post(f"/v1/workers/{worker}/heartbeat", json={})
    put(client, echo)
    claim(client, echo, worker=worker)
    assert client.delete(f"/v1/workers/{worker}").status_code == 204
    assert client.delete(f"/v1/workers/{worker}").status_code == 404
    assert [job["attempt"] for job in claim(client, echo, wait="10s")] == [2]


async def test_a_silent_worker_loses_its_jobs(client: httpx.Client, echo: str) -> None:
    worker = worker_id()
    client.post(f"/v1/workers/{worker}/heartbeat", json={"dead_after_s": 1})
    id = put(client, echo)["id"]
    claim(client, echo, worker=worker)

    def recovered() -> bool:
        return bool(client.get(f"/v1/jobs/{id}").json()["status"] == "queued")

    await eventually(recovered, "the recovery")
    assert client.post(f"/v1/workers/{worker}/heartbeat").json()["known"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("claim", {}),
        ("claim", {"worker": ""}),
        ("claim", {"worker": "a b"}),
        ("claim", {"worker": "w", "limit": 0}),
        ("claim", {"worker": "w", "limit": 100000}),
        ("claim", {"worker": "w", "wait": "long"}),
        ("claim", {"worker": "w", "unknown": 1}),
        ("extend", {"jobs": [{"id": "job_1", "attempt": 1, "lease": 1}]}),
        ("extend", {"jobs": [], "for_s": -1}),
        ("settle", {"jobs": [{"id": new_id(), "attempt": 1, "lease": 1, "outcome": "done"}]}),
        ("settle", {"jobs": [{"id": new_id(), "attempt": 1, "lease": 2**70, "outcome": "succeeded"}]}),
        ("settle", []),
    ],
)
def test_a_bad_call_is_refused(client: httpx.Client, echo: str, path: str, body: Any) -> None:
    response = client.post(f"/v1/jobs/{echo}/{path}", json=body)
    assert (response.status_code, "title" in response.json()) == (400, True)


def gone_client(served: Served, client: httpx.Client, request: bytes) -> None:
    """Send a request that waits, and be gone before the answer."""
    host, port = served.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request)
        until_waiting(client, 1)
    until_waiting(client, 0)


def test_nothing_is_claimed_for_a_client_that_is_gone(served: Served, client: httpx.Client, echo: str) -> None:
    body = b'{"worker": "w1", "wait": "60s"}'
    head = f"POST /v1/jobs/{echo}/claim HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer admin.{TOKEN}\r\n".encode()
    for _ in range(5):
        gone_client(served, client, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    id = put(client, echo)["id"]
    assert [job["id"] for job in claim(client, echo, wait="20s")] == [id]


async def test_waits_end_with_their_clients(served: Served, client: httpx.Client, echo: str) -> None:
    id = put(client, echo)["id"]
    head = f"GET /v1/jobs/{id}?wait=200s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer admin.{TOKEN}\r\n\r\n".encode()

    def answered() -> float:
        of_route = r'^penstock_http_requests_total\{method="GET",route="/v1/jobs/\{id\}",status="200"\} (\S+)'
        found = re.search(of_route, client.get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    before = answered()
    for _ in range(3):
        gone_client(served, client, head)
    await eventually(lambda: answered() == before + 3, "the end of the waits")


def test_an_unknown_type_is_known_at_once(client: httpx.Client) -> None:
    # The client's time limit is shorter than the wait.
    assert client.post("/v1/jobs/nope/claim", json={"worker": "w1", "wait": "250s"}).status_code == 404


@pytest.mark.parametrize("keep", [False, True])
def test_a_result_is_kept_when_the_type_keeps_results(client: httpx.Client, echo: str, keep: bool) -> None:
    client.patch(f"/v1/jobs/{echo}", json={"keep_result": keep})
    id = put(client, echo)["id"]
    (job,) = claim(client, echo)
    assert settle(client, echo, job, result={"price": 1}) == "succeeded"
    assert client.get(f"/v1/jobs/{echo}/{id}/result").json()["result"] == ({"price": 1} if keep else None)


async def test_what_is_settled_over_http_enters_the_rates_with_its_times(url: str, sql: asyncpg.Connection[Any]) -> None:
    with serving(url) as served, served.client() as client:
        for name in ("pull", "call"):
            body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
            assert client.post("/v1/jobs", json=body).status_code == 201
            for _ in range(3):
                put(client, name)
        held = {name: claim(client, name, limit=3) for name in ("pull", "call")}
        await sql.execute(
            "update penstock.queued_jobs set created_at = now() - interval '1 hour', run_after = now() - interval '45 s'"
        )
        await sql.execute("update penstock.leases set started_at = now() - interval '40 s'")
        done, failed, back = held["pull"]
        assert settle(client, "pull", done) == "succeeded"
        assert settle(client, "pull", done) == "stale"
        assert settle(client, "pull", failed, "failed", error="broken") == "retried"
        assert settle(client, "pull", back, "released") == "released"
        for job, status in zip(held["call"], ("succeeded", "failed", "failed"), strict=True):
            told = {"status": status, "attempt": 3} | ({"error": "broken"} if status == "failed" else {})
            assert client.post(f"/v1/jobs/call/{job['id']}", json=told).status_code == 200
    # The server writes what it counted when it stops.
    async with Penstock(url) as app:
        database = await app.database()
        pulled, called = [(await rates.read_period(database, [name])).whole for name in ("pull", "call")]
    assert (pulled.succeeded, pulled.retried, pulled.others) == (1, 1, 1)
    assert (called.succeeded, called.retried) == (1, 2)
    for rate, timed in ((pulled, 2), (called, 3)):
        assert (sum(rate.runs), sum(rate.waits)) == (timed, timed)
        assert rate.run_s == pytest.approx(40 * timed, rel=0.4) and rate.wait_s == pytest.approx(5 * timed, rel=0.4)
