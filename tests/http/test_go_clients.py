"""Bodies as Rickover's own programs send them: Go's JSON does not tell `Status` from `status`."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import httpx
import pytest

from penstock.http import bodies


def claimed(client: httpx.Client, echo: str) -> dict[str, Any]:
    assert client.put(f"/v1/jobs/{echo}/random_id", content=b'{"data": {"n": 1}}').status_code == 202
    (job,) = client.post(f"/v1/jobs/{echo}/claim", json={"worker": "go"}).json()["jobs"]
    # Of a callback, the number is that of the attempts that are left.
    return job | {"attempts": job["max_attempts"]}


@pytest.mark.parametrize(
    "body",
    [
        # downstream-benchmark-server: the struct it got, marshalled again; it never reads "attempts", so its number is 0
        '{"data":{"n":1},"Attempt":0,"Status":"succeeded"}',
        '{"Status":"succeeded","Attempt":ATTEMPT}',
        '{"STATUS":"succeeded","attempt":ATTEMPT,"Retryable":null}\n',
        '{"\u017ftatus":"succeeded","attempt":ATTEMPT}',
        '{"status":"succeeded","attempt":ATTEMPT,"unknown":[1]}',
        '{"status":"failed","Status":"succeeded","Attempt":ATTEMPT}',
    ],
)
def test_callbacks_in_any_case(client: httpx.Client, echo: str, body: str) -> None:
    job = claimed(client, echo)
    sent = client.post(f"/v1/jobs/{echo}/{job['id']}", content=body.replace("ATTEMPT", str(job["attempts"])).encode())
    assert (sent.status_code, sent.content) == (200, b"")
    assert client.get(f"/v1/jobs/{echo}/{job['id']}").json()["status"] == "succeeded"


def test_a_success_without_a_number_counts_only_while_there_was_one_attempt(client: httpx.Client, echo: str) -> None:
    job = claimed(client, echo)
    at = f"/v1/jobs/{echo}/{job['id']}"
    assert client.post(at, content=b'{"Status":"failed","Attempt":0}').status_code == 400
    assert client.post(at, json={"status": "failed", "attempt": job["attempts"]}).status_code == 200
    # Its second attempt: a late word about the first must not settle it.
    refused = client.post(at, content=b'{"Status":"succeeded","Attempt":0}')
    assert (refused.status_code, refused.json()["id"]) == (400, "decrement_failed")
    assert client.get(at).json()["status"] != "succeeded"


def test_jobs_and_types_in_any_case(client: httpx.Client, echo: str) -> None:
    id = uuid4()
    body = b'{"Data":{"Mixed":1},"Run_After":"2046-01-11T18:26:26.000Z","EXPIRES_AT":null,"Other":2}'
    put = client.put(f"/v1/jobs/{echo}/job_{id}", content=body)
    assert (put.status_code, put.json()["data"], put.json()["run_after"][:10]) == (202, {"Mixed": 1}, "2046-01-11")
    name = f"type-{id}"
    created = client.post(
        "/v1/jobs", content=json.dumps({"Name": name, "Attempts": 2, "Concurrency": 3, "Delivery_Strategy": "at_least_once"})
    )
    assert (created.status_code, created.json()["attempts"]) == (201, 2)
    assert client.post("/jobber/queue", json={"Type": name, "Payload": {"A": 1}}).status_code == 201
    batch = client.post(f"/v1/jobs/{name}/batch", content=b'{"DATA": 1}\n{"data": 2, "Key": "a"}\n')
    assert [json.loads(line)["outcome"] for line in batch.text.splitlines()] == ["queued", "queued"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b'{"Data": }', b'{"Attempt": true, "Status": "failed"}', b"\xff"])
def test_what_go_refuses_is_refused(client: httpx.Client, echo: str, body: bytes) -> None:
    for method, path in (("PUT", f"/v1/jobs/{echo}/random_id"), ("POST", f"/v1/jobs/{echo}/job_{uuid4()}")):
        assert client.request(method, path, content=body).status_code == 400


def test_a_body_as_documented_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "folded", lambda body: pytest.fail(f"parsed again: {body!r}"))
    bodies.new_job(b'{"data": {"X": 1}, "run_after": "2026-01-11T18:26:26Z", "key": "a"}', "/")
    bodies.status(b'{"status": "succeeded", "attempt": 1, "retryable": true, "result": {"A": 1}}', "/")
