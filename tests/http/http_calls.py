"""Calls that many tests make."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import httpx

from tests.waiting import until


def new_id() -> str:
    return f"job_{uuid4()}"


def put(client: httpx.Client, name: str, id: str | None = None, data: Any = None, **fields: Any) -> dict[str, Any]:
    response = client.put(f"/v1/jobs/{name}/{id or new_id()}", json={"data": data, **fields})
    assert response.status_code == 202, response.text
    job: dict[str, Any] = response.json()
    return job


def claim(client: httpx.Client, name: str, worker: str = "w1", limit: int = 1, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(f"/v1/jobs/{name}/claim", json={"worker": worker, "limit": limit, **fields})
    assert response.status_code == 200, response.text
    jobs: list[dict[str, Any]] = response.json()["jobs"]
    return jobs


def settle(client: httpx.Client, name: str, job: dict[str, Any], outcome: str = "succeeded", **fields: Any) -> str:
    held = {"id": job["id"], "attempt": job["attempt"], "lease": job["lease"], "outcome": outcome, **fields}
    response = client.post(f"/v1/jobs/{name}/settle", json={"jobs": [held]})
    assert response.status_code == 200, response.text
    return str(response.json()["outcomes"][job["id"]])


def until_waiting(client: httpx.Client, requests: int) -> None:
    """Return when so many requests wait in the server."""
    until(lambda: f"penstock_waiting_requests {requests}.0" in client.get("/metrics").text, f"{requests} waiting requests")
