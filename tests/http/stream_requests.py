"""Requests about streams."""

from __future__ import annotations

import json
import secrets
from typing import Any

import httpx


def create(client: httpx.Client, partitions: int = 1, **options: Any) -> str:
    name = f"s-{secrets.token_hex(4)}"
    answer = client.post("/v1/streams", json={"name": name, "partitions": partitions, **options})
    assert answer.status_code == 201, answer.text
    return name


def append(client: httpx.Client, stream: str, data: Any, **fields: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/streams/{stream}/events", json={"data": data, **fields})
    assert answer.status_code == 201, answer.text
    appended: dict[str, Any] = answer.json()
    return appended


def append_lines(client: httpx.Client, stream: str, events: list[dict[str, Any]], **params: Any) -> httpx.Response:
    body = b"\n".join(json.dumps(event).encode() for event in events)
    headers = {"Content-Type": "application/x-ndjson"}
    return client.post(f"/v1/streams/{stream}/events", content=body, headers=headers, params=params)


def outcomes(answer: httpx.Response) -> list[dict[str, Any]]:
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    return [json.loads(line) for line in answer.text.splitlines()]
