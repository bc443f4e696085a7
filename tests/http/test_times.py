"""Times over HTTP: one without a zone is refused in every body, line and query, by its field, and with what to write."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import httpx
import pytest

UNZONED = "2036-01-11T18:26:26"
ADVICE = "2026-01-31T12:00:00Z"


@pytest.fixture
def places(client: httpx.Client, echo: str) -> dict[str, str]:
    """A job type, a pool, a topic and a stream, by kind."""
    names = {kind: f"{kind}-{echo}" for kind in ("topic", "stream", "pool")} | {"type": echo, "id": str(uuid4())}
    for path, name in (
        ("/v1/topics", names["topic"]), ("/v1/streams", names["stream"]), ("/v1/pools", names["pool"]),
    ):  # fmt: skip
        answer = client.post(path, json={"name": name})
        assert answer.status_code in (200, 201), answer.text
    return names


BODIES: list[tuple[str, str, str, Any]] = [
    ("PUT", "/v1/jobs/{type}/job_{id}", "run_after", {"data": 1, "run_after": UNZONED}),
    ("PUT", "/v1/jobs/{type}/job_{id}", "expires_at", {"data": 1, "expires_at": UNZONED}),
    ("PUT", "/v1/jobs/{type}/job_{id}", "run_after", {"data": 1, "run_after": "2036-01-11"}),
    ("PUT", "/v1/jobs/{type}/job_{id}", "run_after", {"data": 1, "Run_After": UNZONED}),
    ("PUT", "/v1/jobs/{type}/job_{id}", "run_after", {"data": 1, "run_after": "soon"}),
    ("POST", "/v1/jobs/{type}/batch", "run_after", [{"data": 1, "run_after": UNZONED}]),
    ("POST", "/v1/jobs/{type}/batch", "expires_at", [{"data": 1, "expires_at": UNZONED}]),
    ("POST", "/v1/pools/{pool}/jobs", "run_after", {"data": 1, "key": "a", "run_after": UNZONED}),
    ("POST", "/v1/topics/{topic}/messages", "run_after", {"data": 1, "run_after": UNZONED}),
    ("POST", "/v1/topics/{topic}/messages", "expires_at", {"data": 1, "expires_at": UNZONED}),
    ("POST", "/v1/topics/{topic}/messages", "run_after", [{"data": 1, "run_after": UNZONED}]),
    ("POST", "/v1/topics/{topic}/messages", "expires_at", [{"data": 1, "expires_at": UNZONED}]),
    ("POST", "/v1/streams/{stream}/events", "time", {"data": 1, "time": UNZONED}),
    ("POST", "/v1/streams/{stream}/events", "time", [{"data": 1, "time": UNZONED}]),
    ("POST", "/v1/streams/{stream}/groups/g/seek", "time", {"time": UNZONED}),
    ("POST", "/v1/operations", "since", {"kind": "cancel", "filter": {"since": UNZONED}}),
    ("POST", "/v1/operations", "until", {"kind": "replay", "filter": {"until": "2036-01-11"}}),
    ("POST", "/v1/operations/preview", "until", {"kind": "purge", "filter": {"name": "{type}", "until": UNZONED}}),
]


@pytest.mark.parametrize(("method", "path", "field", "body"), BODIES)
def test_a_time_without_a_zone_is_refused_by_its_field(
    client: httpx.Client, places: dict[str, str], method: str, path: str, field: str, body: Any
) -> None:
    path = path.format(**places)
    if isinstance(body, list):
        lines = "\n".join(map(json.dumps, body))
        answer = client.request(method, path, content=lines, headers={"content-type": "application/x-ndjson"})
        assert answer.status_code == 200, answer.text
        said = json.loads(answer.text.splitlines()[0])
        said = said.get("error", said)
    else:
        answer = client.request(method, path, content=json.dumps(body).replace("{type}", places["type"]))
        assert answer.status_code == 400, answer.text
        said = answer.json()
    told = json.dumps(said)
    word = "is not a time" if "soon" in json.dumps(body) else "has no time zone"
    assert field in told and word in told and ADVICE in told, told


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/queued-jobs?name={type}&since={time}", "since"),
        ("/v1/queued-jobs?name={type}&until={time}", "until"),
        ("/v1/archived-jobs?name={type}&since={time}", "since"),
        ("/v1/archived-jobs?name={type}&until={time}", "until"),
    ],
)
def test_a_time_of_a_query_has_its_zone(client: httpx.Client, places: dict[str, str], path: str, field: str) -> None:
    for time, word in ((UNZONED, "has no time zone"), ("2036-01-11", "has no time zone"), ("soon", "is not a time")):
        answer = client.get(path.format(time=time, **places))
        assert (answer.status_code, field in answer.text, word in answer.text, ADVICE in answer.text) == (400, True, True, True)
    for time in (f"{UNZONED}Z", f"{UNZONED}%2B01:00", f"{UNZONED}+01:00"):
        assert client.get(path.format(time=time, **places)).status_code == 200, time


def test_a_stream_is_followed_from_a_time_that_has_its_zone(client: httpx.Client, places: dict[str, str]) -> None:
    for time, word in ((UNZONED, "has no time zone"), ("2036-01-11", "has no time zone"), ("soon", "is not a time")):
        answer = client.get(f"/v1/streams/{places['stream']}/events/follow?from={time}")
        assert (answer.status_code, "from" in answer.text, word in answer.text, ADVICE in answer.text) == (400, True, True, True)


def test_a_job_whose_time_has_a_zone_keeps_it(client: httpx.Client, places: dict[str, str]) -> None:
    path = f"/v1/jobs/{places['type']}/job_{places['id']}"
    answer = client.put(path, json={"data": 1, "run_after": f"{UNZONED}+01:00"})
    assert (answer.status_code, answer.json()["run_after"][:20]) == (202, "2036-01-11T17:26:26Z"), answer.text
