"""Pools over HTTP: creating, enqueueing, looking, draining, growing, keys, standing jobs, scaling advice, gauges."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from penstock import Job, Penstock
from penstock.http.scaling import Scaling
from tests.command_line import penstock
from tests.http.http_calls import new_id
from tests.http.http_server import Served
from tests.waiting import eventually, until

WORKER = """
from collections.abc import AsyncIterator
from penstock import Job, Penstock, Standing
app = Penstock()
pool = app.pool({name!r}, slots=8)

@pool.job
async def run(job: Job[int]) -> None: ...

@pool.standing
async def stand(job: Standing[object]) -> AsyncIterator[None]:
    job.state = {{"runs": 1}}
    yield
"""


@pytest.fixture
def pool(client: httpx.Client) -> str:
    """A pool of its own for each test."""
    name = f"pool-{secrets.token_hex(4)}"
    response = client.post("/v1/pools", json={"name": name, "slots": 8})
    assert response.status_code == 201, response.text
    assert (response.json()["slots"], response.json()["workers"]) == (8, 0)
    return name


@contextmanager
def working(served: Served, folder: Path, pool: str) -> Iterator[subprocess.Popen[bytes]]:
    """A real worker process of a pool."""
    (folder / "pooled.py").write_text(WORKER.format(name=pool))
    worker = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "pooled:app"],
        env={**os.environ, "PENSTOCK_DATABASE_URL": served.database_url},
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield worker
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()


def test_a_job_is_enqueued_once_behind_the_others_of_its_key(client: httpx.Client, pool: str) -> None:
    id = new_id()
    body = {"key": "acme", "data": 12345678901234567890, "id": id}
    first = client.post(f"/v1/pools/{pool}/jobs", json=body)
    again = client.post(f"/v1/pools/{pool}/jobs", json=body)
    assert (first.status_code, first.headers["penstock-outcome"]) == (202, "queued")
    assert (again.status_code, again.headers["penstock-outcome"]) == (202, "duplicate")
    assert first.json() == again.json() | {"data": 12345678901234567890}
    assert (first.json()["id"], first.json()["key"], first.json()["name"]) == (id, "acme", pool)
    client.post(f"/v1/pools/{pool}/jobs", json={"key": "acme", "data": 2, "unique": "u"})
    there = client.post(f"/v1/pools/{pool}/jobs", json={"key": "acme", "data": 3, "unique": "u"})
    assert (there.headers["penstock-outcome"], there.json()["key"], there.json()["data"]) == ("coalesced", "acme", 2)
    state = client.get(f"/v1/pools/{pool}/keys/acme").json()
    assert (state["ready"], state["owner"], state["weight"]) == (2, None, 1)
    assert state["oldest_ready_s"] >= 0
    assert (state["next_job"], state["why"]["reason"]) == (id, "no-worker")


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"data": 1}, 400, "Missing required field: key"),
        ({"key": "", "data": 1}, 400, "Invalid key"),
        ({"key": 7, "data": 1}, 400, "bad JSON"),
        ({"key": "a", "id": "job_7"}, 400, "UUID"),
        ({"key": "a", "data": "x" * 103_000}, 413, "too large"),
        ({"key": "a" * 300, "data": 1}, 400, "key"),
    ],
)
def test_a_bad_job_is_refused(client: httpx.Client, pool: str, body: Any, status: int, word: str) -> None:
    response = client.post(f"/v1/pools/{pool}/jobs", json=body)
    assert (response.status_code, word in response.json()["title"]) == (status, True), response.text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("PATCH", "", {"slots": 9}),
        ("POST", "/jobs", {"key": "a", "data": 1}),
        ("GET", "/workers", None),
        ("GET", "/keys/acme", None),
        ("GET", "/weights", None),
        ("PUT", "/weights/acme", {"weight": 2}),
        ("GET", "/standing", None),
        ("PUT", "/standing", {"wanted": {}}),
        ("PUT", "/standing/acme", {}),
        ("POST", "/standing/acme/messages", {"data": 1}),
    ],
)
def test_an_unknown_pool_is_not_found(client: httpx.Client, method: str, path: str, body: Any) -> None:
    response = client.request(method, f"/v1/pools/nope{path}", json=body)
    assert (response.status_code, response.json()["id"]) == (404, "not_found"), response.text


def test_a_job_type_that_is_no_pool_is_none_here(client: httpx.Client, echo: str) -> None:
    assert client.post(f"/v1/pools/{echo}/jobs", json={"key": "a", "data": 1}).status_code == 404


def test_a_pool_is_changed_and_grows(client: httpx.Client, pool: str) -> None:
    changed = client.patch(
        f"/v1/pools/{pool}", json={"slots": 16, "key_concurrency": 3, "key_rate_limit": 5, "key_rate_period_s": 0.5}
    )
    assert changed.status_code == 200, changed.text
    shown = client.get(f"/v1/pools/{pool}").json()
    assert (shown["slots"], shown["key_concurrency"], shown["key_rate_limit"], shown["key_rate_period_s"]) == (16, 3, 5, 0.5)
    assert shown["on_retry"] == "block"
    assert client.patch(f"/v1/pools/{pool}", json={"slots": 4}).status_code == 409
    assert client.patch(f"/v1/pools/{pool}", json={"key_rate_limit": None}).status_code == 400
    assert client.patch(f"/v1/pools/{pool}", json={"slotz": 4}).status_code == 400
    assert client.patch(f"/v1/pools/{pool}", json={"on_retry": None}).status_code == 400
    assert client.post("/v1/pools", json={"name": pool}).status_code == 409
    assert pool in {one["name"] for one in client.get("/v1/pools").json()}


def test_a_pool_takes_the_options_of_its_job_type(client: httpx.Client) -> None:
    name = f"pool-{secrets.token_hex(4)}"
    options = {
        "slots": 8,
        "key_max_waiting": 5,
        "max_waiting": 2,
        "max_attempts": 7,
        "visibility_timeout_s": 90,
        "keep_failed_s": 86400,
    }
    assert client.post("/v1/pools", json={"name": name, **options}).status_code == 201
    kept = client.get(f"/v1/jobs/{name}", params={"details": "true"}).json()
    assert {option: kept[option] for option in options if option in kept} == {
        "max_waiting": 2, "max_attempts": 7, "visibility_timeout_s": 90, "keep_failed_s": 86400
    }  # fmt: skip
    assert client.get(f"/v1/pools/{name}").json()["key_max_waiting"] == 5
    answers = [client.post(f"/v1/pools/{name}/jobs", json={"key": "acme"}).status_code for _ in range(3)]
    assert answers == [202, 202, 429]
    for wrong, word in (({"max_waiting": 0}, "max_waiting"), ({"rate_limit": 5}, "rate_limit and rate_period go together")):
        refused = client.post("/v1/pools", json={"name": "other", **wrong})
        assert refused.status_code == 400 and word in refused.json()["title"], refused.text


def test_a_type_that_becomes_a_pool_takes_new_options(client: httpx.Client, echo: str) -> None:
    made = client.post("/v1/pools", json={"name": echo, "slots": 8, "convert": True, "max_waiting": 3})
    assert made.status_code == 201, made.text
    kept = client.get(f"/v1/jobs/{echo}", params={"details": "true"}).json()
    assert (kept["max_waiting"], kept["max_attempts"]) == (3, 3)


def test_a_pool_is_dropped_with_its_jobs_only_when_forced(client: httpx.Client, pool: str) -> None:
    id = client.post(f"/v1/pools/{pool}/jobs", json={"key": "acme"}).json()["id"]
    refused = client.delete(f"/v1/jobs/{pool}")
    assert (refused.status_code, refused.json()["title"]) == (409, f"{pool} is a pool")
    assert f"DELETE /v1/pools/{pool}" in refused.json()["detail"]
    refused = client.delete(f"/v1/pools/{pool}")
    assert (refused.status_code, refused.json()["title"]) == (409, f"jobs of {pool} wait")
    assert client.delete(f"/v1/pools/{pool}", params={"force": "true"}).status_code == 204
    assert client.get(f"/v1/pools/{pool}").status_code == 404
    assert client.get(f"/v1/jobs/{id}").json()["status"] == "cancelled"


def test_keys_get_weights(client: httpx.Client, pool: str) -> None:
    key = "a/b c"
    assert client.put(f"/v1/pools/{pool}/weights/{quote(key, safe='')}", json={"weight": 3}).json() == {"weight": 3}
    assert client.get(f"/v1/pools/{pool}/weights").json() == {"weights": {key: 3}}
    assert client.get(f"/v1/pools/{pool}/keys/{quote(key, safe='')}").json()["weight"] == 3
    assert client.put(f"/v1/pools/{pool}/weights/{quote(key, safe='')}", json={"weight": 0}).status_code == 400
    client.put(f"/v1/pools/{pool}/weights/{quote(key, safe='')}", json={"weight": 1})
    assert client.get(f"/v1/pools/{pool}/weights").json() == {"weights": {}}


def test_standing_jobs_are_started_listed_and_stopped(client: httpx.Client, pool: str) -> None:
    at = f"/v1/pools/{pool}/standing"
    assert client.put(f"{at}/acme", json={"data": {"n": 1}}).json() == {"key": "acme", "outcome": "starting"}
    assert client.put(f"{at}/acme", json={"data": {"n": 1}}).json()["outcome"] == "unchanged"
    assert client.put(f"{at}/acme", json={"data": {"n": 2}}).status_code == 409
    assert client.put(f"{at}/acme", json={"data": {"n": 2}, "replace": True}).json()["outcome"] == "replaced"
    assert client.post(f"{at}/acme/messages", json={"data": "now"}).status_code == 202
    shown = client.get(f"{at}/acme").json()
    assert (shown["data"], shown["messages"], shown["running_by"], shown["wanted"]) == ({"n": 2}, 1, None, True)
    assert client.put(at, json={"wanted": {"acme": {"n": 2}, "b": 1, "c": 2}}).json() == {
        "started": 2,
        "replaced": 0,
        "stopped": 0,
    }
    page = client.get(at, params={"limit": 2})
    assert [job["key"] for job in page.json()] == ["acme", "b"]
    rest = client.get(page.links["next"]["url"])
    assert ([job["key"] for job in rest.json()], "next" in rest.links) == (["c"], False)
    assert client.delete(f"{at}/b").status_code == 204
    assert client.delete(f"{at}/b").status_code == 404
    assert client.post(f"{at}/b/messages", json={"data": 1}).status_code == 404
    assert client.put(at, json={"wanted": {}}).json() == {"started": 0, "replaced": 0, "stopped": 2}
    assert client.get(at).json() == []


def test_who_owns_what_and_a_worker_is_moved_out(served: Served, client: httpx.Client, pool: str, tmp_path: Path) -> None:
    at = f"/v1/pools/{pool}"
    assert client.get(f"{at}/workers").json() == [
        {
            "id": None,
            "state": None,
            "joined_at": None,
            "seen_at": None,
            "slots": list(range(8)),
            "coming": [],
            "going": [],
            "metadata": {},
        }
    ]
    client.put(f"{at}/standing/acme", json={})
    with working(served, tmp_path, pool):
        (worker,) = until(
            lambda: [one for one in client.get(f"{at}/workers").json() if one["slots"] == list(range(8)) and one["id"]],
            "the worker",
        )
        id = worker["id"]
        assert client.get(f"{at}/workers/{id}").json()["slots"] == list(range(8))
        assert client.get(f"{at}/keys/acme").json()["owner"] == id
        until(lambda: client.get(f"{at}/standing/acme").json()["running_by"] == id, "the standing job")
        drained = client.post(f"{at}/workers/{id}/drain")
        assert (drained.status_code, drained.json()["state"]) == (200, "draining")
        assert client.post(f"{at}/workers/{id}/undrain").json()["state"] == "active"
        assert client.post(f"{at}/workers/nobody/drain").status_code == 404
        assert client.get(f"{at}/workers/nobody").status_code == 404
        assert client.get(at).json()["workers"] == 1
    until(lambda: client.get(f"{at}/standing/acme").json()["state"] == {"runs": 1}, "the state that the run left")


def test_a_user_needs_the_role_and_the_pool(served: Served, client: httpx.Client, pool: str) -> None:
    def user(role: str, *types: str) -> httpx.Client:
        name = f"u-{secrets.token_hex(4)}"
        arguments = [arg for one in types for arg in ("--type", one)]
        password = {"PENSTOCK_USER_PASSWORD": "secret-of-tests"}
        added = penstock(served.database_url, "users", "add", name, "--role", role, *arguments, **password)
        assert added.returncode == 0, added.stderr
        return served.client(auth=(name, "secret-of-tests"))

    with user("read") as reader, user("enqueue", "others") as stranger, user("enqueue", pool) as shop:
        assert reader.get(f"/v1/pools/{pool}").status_code == 200
        assert reader.post(f"/v1/pools/{pool}/jobs", json={"key": "a", "data": 1}).status_code == 403
        assert reader.put(f"/v1/pools/{pool}/standing/a", json={}).status_code == 403
        assert shop.post(f"/v1/pools/{pool}/jobs", json={"key": "a", "data": 1}).status_code == 202
        assert shop.post(f"/v1/pools/{pool}/workers/w/drain").status_code == 403
        assert [one["name"] for one in shop.get("/v1/pools").json()] == [pool]
        assert {one["name"] for one in shop.get("/v1/scale").json()} <= {pool}
        for path in ("", "/workers", "/standing", "/keys/a", "/weights"):
            assert stranger.get(f"/v1/pools/{pool}{path}").status_code == 403
        assert stranger.post(f"/v1/pools/{pool}/jobs", json={"key": "a", "data": 1}).status_code == 403
        assert stranger.get("/v1/pools").json() == []


def gauges(client: httpx.Client, type: str) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    found = [re.fullmatch(rf'(\w+){{type="{type}"}} (\S+)', line) for line in lines]
    return {match[1]: float(match[2]) for match in found if match}


def test_advice_and_gauges_for_scalers(client: httpx.Client, pool: str) -> None:
    client.post(f"/v1/pools/{pool}/jobs", json={"key": "a", "data": 1})

    def advice() -> dict[str, Any] | None:
        return next((one for one in client.get("/v1/scale?wait_s=0.001").json() if one["name"] == pool and one["ready"]), None)

    found = until(advice, "the advice")
    assert (found["ready"], found["workers"], found["drain_s"], found["advised"]) == (1, 0, None, 1)
    assert found["oldest_ready_s"] > 0
    shown = gauges(client, pool)
    assert shown["penstock_queueing_delay_seconds"] == pytest.approx(found["oldest_ready_s"], abs=20)
    assert shown["penstock_drain_seconds"] == float("inf")
    assert (shown["penstock_scale_workers"], shown["penstock_advised_workers"]) == (0, 1)
    assert client.get("/v1/scale?wait_s=0").status_code == 400


async def test_a_reading_is_kept_however_many_ask(app: Penstock) -> None:
    scaling = Scaling(await app.database(), kept_s=3600)
    await app.pool("work").enqueue("a", 1)
    first = await scaling.advice(5.0)
    await app.pool("other").enqueue("a", 1)
    for advice in await asyncio.gather(*[scaling.advice(5.0) for _ in range(20)]):
        assert advice == first
    assert [one.name for one in await Scaling(await app.database()).advice(5.0)] == ["other", "work"]


async def test_quarantined_keys_are_listed_counted_and_released(client: httpx.Client, served: Served) -> None:
    answers: list[Any] = ["nobody"]
    name = f"pool-{secrets.token_hex(4)}"
    async with Penstock(served.database_url) as app:
        pool = app.pool(name, assign=lambda key, workers: answers[0] if key == "a/b" else 0)

        @pool.job
        async def handle(job: Job[int]) -> None: ...

        worker = await app.worker()
        running = asyncio.create_task(worker.run())
        await pool.enqueue("a/b", 1)
        (bad,) = await eventually(lambda: client.get(f"/v1/pools/{name}/quarantined").json(), "the quarantine")
        assert (bad["key"], bad["jobs"]) == ("a/b", 1)
        assert "assign returned 'nobody'" in bad["error"]
        assert f'penstock_quarantined_keys{{type="{name}"}} 1.0' in client.get("/metrics").text
        assert client.get(f"/v1/pools/{name}/quarantined", params={"after": "b"}).json() == []
        assert client.post(f"/v1/pools/{name}/quarantined/good").status_code == 404
        answers[0] = 0
        assert client.post(f"/v1/pools/{name}/quarantined/a%2Fb").status_code == 202
        await eventually(lambda: client.get(f"/v1/pools/{name}/quarantined").json() == [], "the release")
        worker.stop()
        await running
