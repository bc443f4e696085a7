"""A user who was removed, or may do less, stops receiving over what is open: events, WebSockets, long polls, bodies of lines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock import Penstock
from penstock.http.auth import Authenticator, Credentials, OneUser, Principal, Refused, Role
from penstock.http.live_access import LiveAccess
from penstock.http.user_queries import add_user, remove_user
from penstock.http.users import hash_secret
from penstock.postgres.database import Database
from penstock.testing import TemporaryDatabases
from tests.http.http_server import Served, serving
from tests.waiting import eventually

PASSWORD = "password-of-the-user"


@pytest.fixture(scope="module")
def served(databases: TemporaryDatabases) -> Iterator[Served]:
    async def prepare(url: str) -> None:
        async with Penstock(url) as app:
            database = await app.database()
            await add_user(database, "admin", "admin", hash_secret(PASSWORD), None)
            await app.create_stream("orders", 1)
            await app.topic("news").declare()
            await app.create_job_type("work")
            await app.create_job_type("empty")

    with databases.database() as url:
        asyncio.run(prepare(url))
        with serving(url, token=None, PENSTOCK_HTTP_LIVE_KEEP_ALIVE="1") as served:
            yield served


async def removed(database: Database, name: str) -> None:
    await remove_user(database, name)


async def with_another_secret(database: Database, name: str) -> None:
    await add_user(database, name, "work", hash_secret("another-password"), ["orders", "news", "work"], replace=True)


async def with_fewer_types(database: Database, name: str) -> None:
    await add_user(database, name, "work", hash_secret(PASSWORD), ["work"], replace=True)


def events(served: Served, path: str) -> Callable[[httpx.Client, threading.Event], str]:
    def receive(client: httpx.Client, open: threading.Event) -> str:
        with client.stream("GET", path) as answer:
            assert answer.status_code == 200
            said = ""
            for text in answer.iter_text():
                said += text
                open.set()
            return said

    return receive


def socket(served: Served) -> Callable[[httpx.Client, threading.Event], str]:
    def receive(client: httpx.Client, open: threading.Event) -> str:
        assert client.auth is not None
        header = next(client.auth.sync_auth_flow(client.build_request("GET", "/"))).headers["Authorization"]
        url = f"{served.base_url}/v1/topics/news/deliveries".replace("http", "ws", 1)
        with connect(url, additional_headers={"Authorization": header}) as connection:
            try:
                while True:
                    connection.recv()
                    open.set()
            except ConnectionClosed as closed:
                assert closed.rcvd is not None
                return f"{closed.rcvd.code} {closed.rcvd.reason}"

    return receive


def request(method: str, path: str, body: Any) -> Callable[[httpx.Client, threading.Event], str]:
    def receive(client: httpx.Client, open: threading.Event) -> str:
        open.set()
        return client.request(method, path, json=body).text

    return receive


def lines(client: httpx.Client, open: threading.Event) -> str:
    over = threading.Event()

    def forever() -> Iterator[bytes]:
        while not over.wait(0.2):
            open.set()
            yield json.dumps({"data": 1}).encode() + b"\n"

    try:
        return client.post("/v1/jobs/work/batch", content=forever()).text
    finally:
        over.set()


def kinds(served: Served) -> dict[str, Callable[[httpx.Client, threading.Event], str]]:
    return {
        "events of a stream": events(served, "/v1/streams/orders/events/follow"),
        "deliveries": events(served, "/v1/topics/news/deliveries"),
        "websocket": socket(served),
        "claim": request("POST", "/v1/jobs/empty/claim", {"worker": "w", "wait": "5m"}),
        "wait for events": request("GET", "/v1/streams/orders/events?wait=5m", None),
        "lines": lines,
    }


@pytest.mark.parametrize("change", [removed, with_another_secret, with_fewer_types])
async def test_a_user_who_may_no_longer_stops_receiving_over_what_is_open(served: Served, change: Any) -> None:
    name = change.__name__
    async with Penstock(served.database_url) as app:
        database = await app.database()
        await add_user(database, name, "work", hash_secret(PASSWORD), ["orders", "news", "work", "empty"])
        opened = {kind: threading.Event() for kind in kinds(served)}
        with served.client(auth=(name, PASSWORD)) as client:
            client.timeout = httpx.Timeout(120)
            receiving = {
                kind: asyncio.create_task(asyncio.to_thread(receive, client, opened[kind]))
                for kind, receive in kinds(served).items()
            }
            await eventually(lambda: all(one.is_set() for one in opened.values()), "all connections to be open")
            await change(database, name)
            said = {kind: await asyncio.wait_for(task, 60) for kind, task in receiving.items()}
    for kind in ("events of a stream", "deliveries"):
        assert said[kind].rstrip().endswith('data: {"title":"the access of the user has ended or changed"}'), said[kind]
    assert said["websocket"] == "1008 the access of the user has ended or changed"
    for kind in ("claim", "wait for events", "lines"):
        assert "The access of user" in said[kind], (kind, said[kind])


class Counting:
    """An authorizer that can recall many users, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.users = {f"u{n}": Principal(f"u{n}", Role.WORK, None, b"secret") for n in range(10_000)}

    async def authorize(self, credentials: Credentials | None) -> Principal:
        raise Refused

    async def recall(self, user: str) -> tuple[Principal, bytes] | None:
        raise AssertionError("one at a time")

    async def recall_many(self, users: Collection[str]) -> dict[str, tuple[Principal, bytes]]:
        self.asked.append(len(users))
        return {name: (self.users[name], b"secret") for name in users if name in self.users}


@pytest.fixture
async def counting() -> AsyncIterator[Counting]:
    yield Counting()


async def test_ten_thousand_connections_cost_one_look_and_none_when_they_are_closed(counting: Counting) -> None:
    access = LiveAccess(Authenticator(counting))
    with ExitStack() as stack:
        watches = [stack.enter_context(access.watching(user, Role.WORK, None)) for user in list(counting.users.values()) * 2]
        await access.look()
        assert counting.asked == [10_000]
        assert not any(watch.ended.is_set() for watch in watches)
        del counting.users["u7"]
        counting.users["u8"] = Principal("u8", Role.READ, None, b"secret")
        await access.look()
        assert {watch.principal.name for watch in watches if watch.ended.is_set()} == {"u7", "u8"}
    await access.look()
    assert len(counting.asked) == 2
    await access.close()


async def test_the_user_of_the_servers_token_stays_whichever_user_has_its_name(counting: Counting) -> None:
    one = OneUser("admin", "token-of-the-server", counting)
    principal = await one.authorize(Credentials("admin", "token-of-the-server"))
    counting.users["admin"] = Principal("admin", Role.READ, None, b"of another")
    access = LiveAccess(Authenticator(one))
    with access.watching(principal, Role.ADMIN, None) as token, access.watching(counting.users["admin"], Role.READ, None) as user:
        del counting.users["admin"]
        await access.look()
        assert (token.ended.is_set(), user.ended.is_set()) == (False, True)
    await access.close()
