"""Batches: NDJSON in and out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.http_calls import new_id
from tests.http.http_server import Served


def send(client: httpx.Client, name: str, content: Any) -> list[dict[str, Any]]:
    response = client.post(f"/v1/jobs/{name}/batch", content=content)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def lines(*jobs: Any) -> bytes:
    return "\n".join(json.dumps(job) for job in jobs).encode()


def test_a_line_for_each_job(client: httpx.Client, echo: str) -> None:
    first, second = new_id(), new_id()
    outcomes = send(
        client, echo, lines({"id": first, "data": 1}, {"id": second, "data": 2}, {"id": first, "data": 3}, {"data": 4})
    )
    assert [line["outcome"] for line in outcomes] == ["queued", "queued", "duplicate", "queued"]
    assert [line["line"] for line in outcomes] == [1, 2, 3, 4]
    assert [line["id"] for line in outcomes[:3]] == [first, second, first]
    assert client.get(f"/v1/jobs/{first}").json()["data"] == 1


def test_the_lines_that_do_not_fit_into_a_full_queue_are_refused(client: httpx.Client, echo: str) -> None:
    assert client.patch(f"/v1/jobs/{echo}", json={"max_waiting": 2}).json()["max_waiting"] == 2
    outcomes = send(client, echo, lines({"data": 1}, {"data": 2}, {"data": 3}))
    assert [line.get("outcome") or line["error"]["id"] for line in outcomes] == ["queued", "queued", "queue_full"]
    refused = client.put(f"/v1/jobs/{echo}/random_id", json={"data": 4})
    assert (refused.status_code, refused.json()["id"], refused.headers["retry-after"]) == (429, "queue_full", "1")


def test_bad_lines_do_not_stop_the_others(client: httpx.Client, echo: str) -> None:
    content = b"\n".join(
        [
            b'{"data": 1}',
            b"{broken",
            b"",
            b'{"id": "job_1", "data": 1}',
            b'{"data": "\\u0000"}',
            b'{"data": 1, "priority": 500}',
            b'{"data": 1, "run_after": "soon"}',
            b'{"data": "\xff"}',
            json.dumps({"data": "x" * 110_000}).encode(),
            b'{"key": "acme", "unique": "u", "priority": 3, "run_after": "2036-01-11T18:26:26Z"}',
            b'{"unique": "u"}',
        ]
    )
    outcomes = {line["line"]: line.get("outcome") or line["error"]["id"] for line in send(client, echo, content)}
    assert outcomes == {
        1: "queued",
        2: "invalid_request",
        4: "invalid_uuid",
        5: "invalid_parameter",
        6: "invalid_parameter",
        7: "invalid_request",
        8: "invalid_request",
        9: "entity_too_large",
        10: "queued",
        11: "coalesced",
    }


def test_an_empty_batch(client: httpx.Client, echo: str) -> None:
    assert send(client, echo, b"") == []


def test_an_unknown_type_is_refused(client: httpx.Client) -> None:
    response = client.post("/v1/jobs/nope/batch", content=b"{}")
    assert (response.status_code, response.json()["id"]) == (404, "job_type_not_found")


def test_a_line_without_end_is_refused(client: httpx.Client, echo: str) -> None:
    response = client.post(f"/v1/jobs/{echo}/batch", content=b"x" * 400_000)
    assert response.status_code == 413


def resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.parametrize("count", [60_000])
def test_a_long_stream_takes_no_more_memory(served: Served, client: httpx.Client, echo: str, count: int) -> None:
    filler = "x" * 500

    def stream(n: int) -> Iterator[bytes]:
        for number in range(n):
            yield json.dumps({"data": {"n": number, "filler": filler}}).encode() + b"\n"

    send(client, echo, stream(2_000))
    before = resident_kb(served.process.pid)
    outcomes = Counter(line["outcome"] for line in send(client, echo, stream(count)))
    assert outcomes == {"queued": count}
    # 30 MB went through.
    assert resident_kb(served.process.pid) - before < 15_000
