"""Operations over HTTP: previewed, started, looked at and cancelled, by users who may."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest

from penstock import Erasure, ErasurePreview, InvalidInput, JobFilter, NewJob, NotFound
from penstock.client import AsyncClient, Client
from penstock.http.users import hash_secret
from tests.http.http_server import TOKEN, Served

SECRET = "the-secret-word-of-ada"


def test_the_clients_start_an_operation_and_wait_for_its_end(served: Served, echo: str) -> None:
    with Client(served.base_url, "admin", TOKEN) as penstock:
        penstock.enqueue_many(echo, [NewJob(n, key=f"k{n % 2}") for n in range(20)])
        operations, wanted = penstock.operations, JobFilter(name=echo, key="k1")
        preview = operations.preview("cancel", wanted)
        assert (preview.jobs, preview.whole, len(preview.sample)) == (10, True, 10)
        started = operations.start("cancel", wanted, id=uuid4())
        assert started.filter == {"name": echo, "key": "k1"}
        # The maintenance of the server does it.
        ended = operations.wait(started.id, timeout=timedelta(minutes=1))
        assert (ended.state, ended.done, ended.failed) == ("finished", 10, 0)
        assert operations.start("cancel", wanted, id=started.id).state == "finished"
        assert operations.cancel(started.id).state == "finished"
        assert started.id in [each.id for each in operations.list()]
        assert {str(job.status) for job in penstock.find_many(name=echo, key="k1")} == {"cancelled"}

    async def with_async_client() -> None:
        async with AsyncClient(served.base_url, "admin", TOKEN) as client:
            purge = await client.operations.start("purge", JobFilter(name=echo))
            assert (await client.operations.wait(purge.id, timeout=timedelta(minutes=1))).done == 10

    asyncio.run(with_async_client())


def test_an_erasure_is_previewed_started_and_found_among_the_operations(served: Served, echo: str) -> None:
    with Client(served.base_url, "admin", TOKEN) as penstock:
        penstock.enqueue_many(echo, [NewJob({"customer": f"c{n % 2}"}, key=f"of {echo} {n % 2}") for n in range(10)])
        operations, wanted = penstock.operations, Erasure(key=f"of {echo} 1")
        assert operations.preview_erasure(wanted) == ErasurePreview(5, 0, 0, 0, 0, 0)
        started = operations.erase(wanted, id=uuid4())
        assert (started.kind, started.phase) == ("erase", "queue")
        ended = operations.wait(started.id, timeout=timedelta(minutes=1))
        assert (ended.state, ended.counts, ended.filter) == ("finished", {"queued": 5}, {})
        assert operations.erase(wanted, id=started.id).state == "finished"
        with pytest.raises(InvalidInput, match="either a key, or a field"):
            operations.erase(Erasure())


def test_what_does_not_fit_is_refused(served: Served, client: httpx.Client, echo: str) -> None:
    with Client(served.base_url, "admin", TOKEN) as penstock:
        with pytest.raises(InvalidInput, match="a filter without a condition"):
            penstock.operations.start("cancel", JobFilter())
        with pytest.raises(NotFound):
            penstock.operations.preview("cancel", JobFilter(name="none-of-these"))
        for call in (penstock.operations.find, penstock.operations.cancel):
            with pytest.raises(NotFound):
                call(uuid4())
    for wrong in ({"kind": "drop", "filter": {"name": echo}}, {"kind": "cancel", "filter": {"nam": echo}}, {"kind": "cancel"}):
        assert client.post("/v1/operations", json=wrong).status_code == 400
    assert client.get("/v1/operations/seven").status_code == 404


async def test_a_user_of_some_types_names_one_and_sees_only_its_operations(
    served: Served, client: httpx.Client, echo: str
) -> None:
    connection: asyncpg.Connection[Any] = await asyncpg.connect(served.database_url)
    await connection.execute("select penstock.create_job_type('hidden')")
    hidden = client.post("/v1/operations", json={"kind": "cancel", "filter": {"name": "hidden"}}).json()["id"]
    await connection.execute("select penstock.add_user('ada', 'enqueue', $1, array[$2])", hash_secret(SECRET), echo)
    await connection.close()
    with served.client(auth=("ada", SECRET)) as ada:
        started = ada.post("/v1/operations", json={"kind": "cancel", "filter": {"name": echo}})
        assert started.status_code == 202
        for wanted in ({"name": "hidden"}, {"key": "k"}):
            for path in ("/v1/operations", "/v1/operations/preview"):
                assert ada.post(path, json={"kind": "cancel", "filter": wanted}).status_code == 403
        assert [each["id"] for each in ada.get("/v1/operations").json()] == [started.json()["id"]]
        assert ada.get(f"/v1/operations/{hidden}").status_code == 404
        assert ada.post(f"/v1/operations/{hidden}/cancel").status_code == 404
