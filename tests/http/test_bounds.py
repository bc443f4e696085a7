"""Numbers that no double can hold are refused at every entry of the API, and what is there nevertheless stops only itself."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import struct
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest

from penstock.core.serialization import check_numbers
from tests.http.http_server import Served
from tests.waiting import until

POISON = ["1e131071", "-1e400", "1e-400", '{"a": [1E+00999]}', json.dumps([10**310]), "[" + "1e131071," * 3000 + "1]"]
ENTRIES: dict[str, tuple[str, str, str]] = {
    "put": ("PUT", "/v1/jobs/{type}/random_id", '{"data": %s}'),
    "batch": ("POST", "/v1/jobs/{type}/batch", '{"data": %s}'),
    "jobber": ("POST", "/jobber/queue", '{"type": "{type}", "payload": %s}'),
    "callback's result": ("POST", "/v1/jobs/{type}/{id}", '{"status": "succeeded", "attempt": 3, "result": %s}'),
    "callback's error": ("POST", "/v1/jobs/{type}/{id}", '{"status": "failed", "attempt": 3, "error": %s}'),
    "settle": (
        "POST", "/v1/jobs/{type}/settle",
        '{"worker": "w", "jobs": [{"id": "{id}", "attempt": 3, "lease": 1, "outcome": "failed", "error": %s}]}',
    ),
    "replay": ("POST", "/v1/jobs/{type}/{id}/replay?force=true", '{"data": %s}'),
    "event": ("POST", "/v1/streams/{type}/events", '{"data": %s}'),
    "header": ("POST", "/v1/streams/{type}/events", '{"data": 1, "headers": {"a": %s}}'),
    "publish": ("POST", "/v1/topics/{type}/messages", '{"data": %s}'),
    "subscribe": ("PUT", "/v1/topics/{type}/subscribers/c", '{"filter": %s}'),
    "pool": ("POST", "/v1/pools/{type}-pool/jobs", '{"key": "k", "data": %s}'),
    "standing": ("PUT", "/v1/pools/{type}-pool/standing/k", '{"data": %s}'),
    "message": ("POST", "/v1/pools/{type}-pool/standing/k/messages", '{"data": %s}'),
}  # fmt: skip


@pytest.fixture
def things(client: httpx.Client, echo: str) -> str:
    """A job type, a stream and a topic of one name, and a pool."""
    assert client.post("/v1/streams", json={"name": echo, "partitions": 1}).status_code == 201
    assert client.post("/v1/topics", json={"name": echo}).status_code == 201
    assert client.post("/v1/pools", json={"name": f"{echo}-pool", "slots": 1}).status_code == 201
    assert client.put(f"/v1/pools/{echo}-pool/standing/k", json={"data": 1}).status_code == 200
    return echo


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_entry_admits_numbers_that_no_double_can_hold(client: httpx.Client, things: str, entry: str) -> None:
    method, path, body = ENTRIES[entry]
    id = "job_" + str(uuid4())
    assert client.put(f"/v1/jobs/{things}/{id}", json={"data": 1}).status_code == 202
    for poison in POISON:
        url = path.replace("{type}", things).replace("{id}", id)
        content = body.replace("{type}", things).replace("{id}", id).replace("%s", poison)
        answer = client.request(method, url, content=content.encode(), headers={"Content-Type": "application/json"})
        if entry == "batch":
            # Each line has its own outcome.
            assert answer.json()["error"]["id"] in ("invalid_parameter", "invalid_request"), (poison, answer.text[:300])
            continue
        # For what it is, and not for something else that is wrong with the request.
        assert answer.status_code in (400, 413), (poison, answer.text[:300])
        assert re.search("number|larger", answer.json()["title"]), (poison, answer.text[:300])
        assert len(answer.content) < 2_000
    assert client.get(f"/v1/jobs/{things}/{id}").json()["data"] == 1
    assert len(client.get("/v1/queued-jobs", params={"name": things}).json()) == 1


def test_whole_numbers_are_stored_exactly(client: httpx.Client, echo: str) -> None:
    for number in (2**53 + 1, 2**64, 10**300, -(2**70)):
        stored = client.put(f"/v1/jobs/{echo}/random_id", content=f'{{"data": {number}}}'.encode()).json()
        assert json.loads(client.get(f"/v1/jobs/{echo}/{stored['id']}").content)["data"] == number


def test_texts_are_no_numbers() -> None:
    for fine in (
        '"1e999"',
        '{"a1e999": "\\"1e999"}',
        '["' + "9" * 400 + '"]',
        "1.7976931348623157e308",
        "0e999",
        "0.0e-999",
        "5e-324",
    ):
        assert check_numbers(fine, "x") == fine


def test_an_unreadable_job_stops_neither_lists_nor_claims(client: httpx.Client, served: Served, echo: str) -> None:
    id = write(served.database_url, echo)
    healthy = client.put(f"/v1/jobs/{echo}/random_id", json={"data": {"n": 1}}).json()["id"]
    assert {job["id"] for job in client.get("/v1/queued-jobs", params={"name": echo}).json()} == {f"job_{id}", healthy}
    assert client.get(f"/v1/jobs/job_{id}").json()["data"] is None
    claimed = client.post(f"/v1/jobs/{echo}/claim", json={"worker": "w", "limit": 5}).json()["jobs"]
    assert [job["id"] for job in claimed] == [healthy]
    listed = client.get("/v1/archived-jobs", params={"name": echo, "reason": "quarantined", "details": "true"}).json()
    assert [(job["id"], job["status"], job["reason"]) for job in listed] == [(f"job_{id}", "failed", "quarantined")]
    assert client.get("/v1/archived-jobs", params={"name": echo, "reason": "other"}).json() == []
    # The server counts every few seconds.
    until(lambda: client.get(f"/v1/jobs/{echo}/stats").json()["quarantined_last_hour"] == 1, "the count of what is quarantined")
    refused = client.post(f"/v1/jobs/job_{id}/replay")
    assert (refused.status_code, refused.json()["id"]) == (409, "conflict")
    again = client.post(f"/v1/jobs/job_{id}/replay", json={"data": {"n": 2}})
    assert (again.status_code, again.json()["data"]) == (201, {"n": 2})
    other = write(served.database_url, echo)
    assert client.post(f"/v1/jobs/job_{other}/cancel").json()["status"] == "cancelled"
    assert client.get(f"/v1/jobs/job_{other}").json()["status"] == "cancelled"


def test_an_event_that_cannot_be_unpacked_stops_no_reader(client: httpx.Client, served: Served) -> None:
    name = f"s-{secrets.token_hex(4)}"
    body = {"name": name, "partitions": 1, "format": "bytes", "compression": "zstd"}
    assert client.post("/v1/streams", json=body).status_code == 201
    events = f"/v1/streams/{name}/events"
    assert client.post(events, json={"bytes": "MQ=="}).status_code == 201
    claim = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**45) + b"\x01\x00"
    run(
        served.database_url,
        "do $$ begin execute format('insert into penstock.%I (partition, first_offset, events, appended_at, times, bytes)"
        f" values (0, 1, 1, now(), array[''20000-01-01''::timestamptz], array[''\\x{claim.hex()}''::bytea])',"
        " (select max(segments.table_name) from penstock.segments join penstock.streams on streams.id = stream"
        f" where name = '{name}'));"
        " end $$",
    )
    assert client.post(events, json={"bytes": "Mw=="}).status_code == 201
    found = client.get(events, params={"partition": 0, "offset": 0}).json()
    assert found["next_offset"] == 3
    assert [event["bytes"] for event in found["events"]] == ["MQ==", None, "Mw=="]
    assert [bool(event.get("error")) for event in found["events"]] == [False, True, False]


def run(url: str, statement: str, *args: Any) -> None:
    async def once() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(statement, *args)
        await connection.close()

    asyncio.run(once())


def write(url: str, name: str) -> str:
    """A job that no entry admits, in front of all others."""
    id = str(uuid4())
    run(
        url,
        "insert into penstock.queued_jobs (id, name, seq, run_after, created_at, updated_at, attempt, max_attempts, data)"
        " values ($1, $2, 1, now(), now(), now(), 3, 3, ('[' || repeat('1e131071,', 40) || '1]')::jsonb)",
        id, name,
    )  # fmt: skip
    return id
