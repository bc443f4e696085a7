"""An id that is in use for a job of another type: the API says that, and nothing of the job."""

from __future__ import annotations

import json
import secrets
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.http.http_server import Served


@pytest.fixture
def theirs(client: httpx.Client) -> str:
    name = f"theirs-{secrets.token_hex(4)}"
    body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 1, "concurrency": 5}
    assert client.post("/v1/jobs", json=body).status_code == 201
    return name


def in_each_state(client: httpx.Client, theirs: str) -> dict[str, str]:
    """Jobs of another type: one that is queued, one that waits for it, one that has ended."""
    ids = {state: f"job_{uuid4()}" for state in ("queued", "waiting", "archived")}
    sent: dict[str, Any] = {"data": "secret", "key": "secret-key", "run_after": "2999-01-01T00:00:00Z"}
    for state in ("queued", "archived"):
        assert client.put(f"/v1/jobs/{theirs}/{ids[state]}", json=sent).status_code == 202
    assert client.put(f"/v1/jobs/{theirs}/{ids['waiting']}", json={"data": "secret", "after": [ids["queued"]]}).status_code == 202
    assert client.post(f"/v1/jobs/{ids['archived']}/cancel").status_code < 300
    return ids


@pytest.mark.parametrize("more", [{}, {"unique": "u"}, {"priority": 3}, {"key": "k"}])
def test_a_put_under_the_id_of_another_types_job_says_that_the_id_is_in_use_and_nothing_else(
    client: httpx.Client, echo: str, theirs: str, more: dict[str, Any]
) -> None:
    answers = []
    for id in in_each_state(client, theirs).values():
        answer = client.put(f"/v1/jobs/{echo}/{id}", json={"data": 1, **more})
        answers.append((answer.status_code, answer.text.replace(id, "ID")))
    assert [status for status, _ in answers] == [409] * 3
    assert len({*answers}) == 1
    assert (json.loads(answers[0][1])["id"], theirs in answers[0][1], "secret" in answers[0][1]) == ("id_taken", False, False)


def test_a_batch_and_a_pool_say_no_more_than_that_an_id_is_in_use(
    served: Served, client: httpx.Client, echo: str, theirs: str
) -> None:
    ids = in_each_state(client, theirs)
    lines = [json.dumps({"id": id, "data": 1}) for id in ids.values()] + [json.dumps({"data": 2})]
    batch = client.post(f"/v1/jobs/{echo}/batch", content="\n".join(lines))
    assert [json.loads(line)["outcome"] for line in batch.text.splitlines()[:4]] == ["taken", "taken", "taken", "queued"]
    pool = f"pool-{secrets.token_hex(4)}"
    assert client.post("/v1/pools", json={"name": pool, "slots": 4}).status_code < 300
    for id in ids.values():
        answer = client.post(f"/v1/pools/{pool}/jobs", json={"id": id, "key": "acme", "data": 1})
        assert (answer.status_code, "secret" in answer.text, theirs in answer.text) == (409, False, False)
