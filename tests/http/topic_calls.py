"""Requests about topics."""

from __future__ import annotations

import secrets
from typing import Any

import httpx


def declare(client: httpx.Client, **options: Any) -> str:
    name = f"t-{secrets.token_hex(4)}"
    answer = client.post("/v1/topics", json={"name": name, **options})
    assert answer.status_code == 201, answer.text
    return name


def publish(client: httpx.Client, topic: str, data: Any = None, **fields: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/topics/{topic}/messages", json={"data": data, **fields})
    assert answer.status_code == 202, answer.text
    receipt: dict[str, Any] = answer.json()
    return receipt


def subscribe(client: httpx.Client, topic: str, client_id: str, **fields: Any) -> dict[str, Any]:
    answer = client.put(f"/v1/topics/{topic}/subscribers/{client_id}", json=fields)
    assert answer.status_code == 200, answer.text
    receipt: dict[str, Any] = answer.json()
    return receipt
