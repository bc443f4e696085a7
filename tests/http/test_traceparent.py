"""Each route that enqueues, appends or publishes takes the trace context of its client, and an answer to a claim gives it on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import httpx
import pytest

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
LINES = {"Content-Type": "application/x-ndjson"}


def put(client: httpx.Client, name: str, headers: Any) -> httpx.Response:
    return client.put(f"/v1/jobs/{name}/{uuid4()}", json={"data": 1}, headers=headers)


def batch(client: httpx.Client, name: str, headers: Any) -> httpx.Response:
    return client.post(
        f"/v1/jobs/{name}/batch", content='{"data": 1, "max_attempts": 2}\n{"data": 2}\n', headers=[*headers, *LINES.items()]
    )


def jobber(client: httpx.Client, name: str, headers: Any) -> httpx.Response:
    return client.post("/jobber/queue", json={"type": name, "payload": 1}, headers=headers)


def claimed(client: httpx.Client, name: str) -> list[str | None]:
    answer = client.post(f"/v1/jobs/{name}/claim", json={"worker": "w", "limit": 10})
    assert answer.status_code == 200, answer.text
    return [job["traceparent"] for job in answer.json()["jobs"]]


@pytest.mark.parametrize("send", [put, batch, jobber])
def test_a_job_has_the_context_of_its_request(
    client: httpx.Client, echo: str, send: Callable[[httpx.Client, str, Any], httpx.Response]
) -> None:
    assert send(client, echo, [("traceparent", SAMPLED)]).is_success
    assert set(claimed(client, echo)) == {SAMPLED}
    assert send(client, echo, [("TraceParent", UNSAMPLED)]).is_success
    assert set(claimed(client, echo)) == {UNSAMPLED}


@pytest.mark.parametrize("send", [put, batch, jobber])
@pytest.mark.parametrize(
    "headers",
    [[], [("traceparent", "nonsense")], [("traceparent", b"\xff\xfe")], [("traceparent", SAMPLED), ("traceparent", UNSAMPLED)]],
)
def test_a_request_without_a_valid_context_is_as_good_as_any(
    client: httpx.Client, echo: str, headers: Any, send: Callable[[httpx.Client, str, Any], httpx.Response]
) -> None:
    assert send(client, echo, headers).is_success
    assert set(claimed(client, echo)) == {None}


def test_a_keyed_job_a_message_and_an_event_have_it_too(client: httpx.Client) -> None:
    headers = {"traceparent": SAMPLED}
    assert client.post("/v1/pools", json={"name": "traced-pool"}).is_success
    assert client.post("/v1/pools/traced-pool/jobs", json={"key": "acme", "data": 1}, headers=headers).status_code == 202

    assert client.post("/v1/topics", json={"name": "traced-topic"}).is_success
    assert client.put("/v1/topics/traced-topic/subscribers/a", json={}).is_success
    assert client.post("/v1/topics/traced-topic/messages", json={"data": 1}, headers=headers).status_code == 202
    assert client.post("/v1/topics/traced-topic/messages", content='{"data": 2}\n', headers={**headers, **LINES}).is_success
    assert claimed(client, "traced-topic_a") == [SAMPLED, SAMPLED]

    assert client.post("/v1/streams", json={"name": "traced-stream", "partitions": 1}).is_success
    events = "/v1/streams/traced-stream/events"
    assert client.post(events, json={"data": 1, "headers": {"a": 1}}, headers=headers).is_success
    lines = "\n".join(json.dumps({"data": 2, "headers": given}) for given in ({}, {"traceparent": UNSAMPLED}))
    assert client.post(events, content=lines, headers={**headers, **LINES}).is_success
    assert client.post(events, json={"data": 3}).is_success
    found = [event["headers"] for event in client.get(events, params={"partition": 0}).json()["events"]]
    assert found == [{"traceparent": SAMPLED, "a": 1}, {"traceparent": SAMPLED}, {"traceparent": UNSAMPLED}, {}]
