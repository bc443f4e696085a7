"""Encrypted streams, topics, pools and steps over HTTP: neither the server nor its clients have keys; each refusal says so."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import timedelta
from uuid import uuid4

import httpx
import pytest

from penstock import Job, Penstock
from penstock.client import Client
from penstock.core.encryption import new_key
from penstock.errors import InvalidInput
from penstock.testing import run_due_jobs
from tests.http.dashboard_browser import Reader
from tests.http.http_server import TOKEN, Served

WORD = "quokka"


@pytest.fixture
def name() -> str:
    return f"sealed-{secrets.token_hex(4)}"


@pytest.fixture
def penstock(served: Served) -> Iterator[Client]:
    with Client(served.base_url, "admin", TOKEN) as client:
        yield client


async def test_a_stream(served: Served, client: httpx.Client, penstock: Client, name: str) -> None:
    assert penstock.create_stream(name, 1, encrypted=True).encrypted
    with pytest.raises(InvalidInput, match=f"stream {name} is encrypted, and event 1 of 1 is not"):
        penstock.stream(name).append({"word": WORD})
    joined = client.put(f"/v1/streams/{name}/groups/g/members/m", json={"session": str(uuid4())})
    assert joined.status_code == 409 and "members over HTTP have no keys" in joined.text
    async with Penstock(served.database_url, keys=[new_key()]) as app:
        await app.stream(name, encrypted=True, partitions=1).append({"word": WORD}, key="acme")
    (event,) = penstock.stream(name).read(0)
    assert event.key == "acme" and event.data.keys() == {"penstock"}, "who reads without keys gets envelopes"
    assert penstock.stream(name).change(encrypted=False).encrypted_at is not None
    penstock.stream(name).append({"n": 1})


async def test_a_topic(served: Served, client: httpx.Client, penstock: Client, name: str) -> None:
    topic = penstock.topic(name, encrypted=True)
    topic.declare()
    assert topic.details().encrypted
    with pytest.raises(InvalidInput, match=f"topic {name} is encrypted, and document 1 of 1 is not"):
        topic.publish({"word": WORD})
    received = client.get(f"/v1/topics/{name}/deliveries", params={"client_id": "browser"})
    assert received.status_code == 409 and "subscriber browser has no key" in received.text
    filtered = client.put(f"/v1/topics/{name}/subscribers/JFK", json={"filter": {"dest": "JFK"}})
    assert filtered.status_code == 409 and "has a filter" in filtered.text
    async with Penstock(served.database_url, keys=[new_key()]) as app:
        await app.topic(name, encrypted=True).publish({"word": WORD})
    assert WORD not in client.get(f"/v1/topics/{name}/messages").text


async def test_standing_jobs(served: Served, client: httpx.Client, penstock: Client, name: str) -> None:
    async with Penstock(served.database_url, keys=[new_key()]) as app:
        await app.pool(name, encrypted=True).start("acme", {"word": WORD})
    started = client.put(f"/v1/pools/{name}/standing/bolt", json={"data": {"word": WORD}})
    assert started.status_code == 400 and f"pool {name} is encrypted" in started.text
    assert client.get(f"/v1/pools/{name}/standing/acme").json()["data"] == "encrypted"
    assert [one["data"] for one in client.get(f"/v1/pools/{name}/standing").json()] == ["encrypted"]


async def test_steps(served: Served, client: httpx.Client, penstock: Client, name: str) -> None:
    app = Penstock(served.database_url, keys=[new_key()])

    @app.job(name, encrypted=True)
    async def charge(job: Job[str]) -> None:
        await job.step("charge", lambda: {"word": WORD})
        await job.sleep("cool off", timedelta(days=1))

    async with app:
        receipt = await charge.enqueue(WORD)
        await run_due_jobs(app)
    assert WORD not in client.get(f"/v1/jobs/job_{receipt.id}/steps").text
    charged, slept = penstock.steps(receipt.id)
    assert (charged.name, charged.result, slept.state) == ("charge", "encrypted", "waiting")
    assert charged.size is not None and charged.size > len(WORD)
    with Reader(served.base_url + "/") as reading:
        reading.log_in("admin", TOKEN)
        page = reading.get(f"jobs/{receipt.id}").text
    assert "charge" in page and "encrypted" in page and WORD not in page
