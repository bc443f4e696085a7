"""A second replay is refused unless it is forced, in each of the ways to replay a job; and a job shows its replays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import pytest

from penstock import Conflict, Penstock
from penstock.client import Client
from tests.command_line import penstock
from tests.http.http_calls import claim, put
from tests.http.http_server import TOKEN, Served

Replay = Callable[[Served, str, str, bool], str | None]


def in_sql(served: Served, name: str, id: str, force: bool) -> str | None:
    async def replay() -> None:
        connection = await asyncpg.connect(served.database_url)
        try:
            await connection.execute(f"select penstock.replay($1{', p_force => true' if force else ''})", id.removeprefix("job_"))
        finally:
            await connection.close()

    try:
        asyncio.run(replay())
    except asyncpg.PostgresError as error:
        return str(error)
    return None


def in_python(served: Served, name: str, id: str, force: bool) -> str | None:
    async def replay() -> None:
        async with Penstock(served.database_url) as app:
            await app.replay(id, force=force)

    try:
        asyncio.run(replay())
    except Conflict as error:
        return str(error)
    return None


def _over_http(path: str) -> Replay:
    def replay(served: Served, name: str, id: str, force: bool) -> str | None:
        with served.client() as client:
            answer = client.post(path.format(name=name, id=id), params={"force": "true"} if force else {})
        if answer.status_code == 409:
            return str(answer.json())
        assert answer.status_code == 201, answer.text
        return None

    return replay


def with_client(served: Served, name: str, id: str, force: bool) -> str | None:
    with Client(served.base_url, "admin", TOKEN) as client:
        try:
            client.replay(id, force=force)
        except Conflict as error:
            return str(error)
    return None


def _with_command(*before: str) -> Replay:
    def replay(served: Served, name: str, id: str, force: bool) -> str | None:
        target = [] if not before else [*before, served.base_url]
        arguments = [*target, "jobs", "replay", id, *(["--force"] if force else [])]
        ended = penstock(served.database_url, *arguments, PENSTOCK_SERVER_TOKEN=f"admin.{TOKEN}")
        return None if ended.returncode == 0 else ended.stderr

    return replay


WAYS: dict[str, Replay] = {
    "SQL": in_sql,
    "Python": in_python,
    "HTTP": _over_http("/v1/jobs/{id}/replay"),
    "HTTP of Rickover": _over_http("/v1/jobs/{name}/{id}/replay"),
    "client": with_client,
    "command": _with_command(),
    "command of a server": _with_command("--server"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_second_replay_is_refused_unless_it_is_forced(served: Served, client: httpx.Client, echo: str, way: str) -> None:
    replay = WAYS[way]
    id = put(client, echo)["id"]
    claim(client, echo)
    client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": 3})

    assert replay(served, echo, id, False) is None
    refusal = replay(served, echo, id, False)
    assert refusal is not None and "was replayed already" in refusal and "queued" in refusal
    assert replay(served, echo, id, True) is None

    shown: dict[str, Any] = client.get(f"/v1/jobs/{id}?details=true").json()
    assert len(shown["replayed_by"]) == 2
    for copy in shown["replayed_by"]:
        assert client.get(f"/v1/jobs/{copy}?details=true").json()["replay_of"] == id


def test_a_job_shows_its_replays_in_lists_and_in_the_clients_and_commands(
    served: Served, client: httpx.Client, echo: str
) -> None:
    id = put(client, echo)["id"]
    claim(client, echo)
    client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": 3})
    copies = {client.post(f"/v1/jobs/{id}/replay?force=true").json()["id"] for _ in range(2)}

    (listed,) = client.get("/v1/archived-jobs", params={"name": echo, "details": "true"}).json()
    assert (listed["id"], set(listed["replayed_by"])) == (id, copies)
    ids = {UUID(copy.removeprefix("job_")) for copy in copies}
    with Client(served.base_url, "admin", TOKEN) as typed:
        (found,) = typed.find_many(name=echo, status="succeeded")
        assert (set(found.replayed_by), set(typed.find(id).replayed_by)) == (ids, ids)
    shown = penstock(served.database_url, "jobs", "show", id).stdout
    assert all(str(copy) in shown for copy in ids), shown
