"""Two tenants in one database, and an application in this process whose statements can be counted for each request."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

import httpx
from starlette.types import ASGIApp, Message

from penstock import Penstock
from penstock.http.auth import Credentials, Principal, Refused, Role
from penstock.http.server import create_app
from penstock.http.settings import HttpSettings
from penstock.postgres.database import Database, Transaction
from penstock.postgres.read_only import ReadOnlyDatabase

TYPES = frozenset({"mine", "mine-pool"})
USERS = {"admin": Principal("admin", Role.ADMIN), "narrow": Principal("narrow", Role.ADMIN, TYPES)}
# The statements of the request of this context.
_STATEMENTS: ContextVar[list[str] | None] = ContextVar("statements", default=None)


# Tasks that a request may start, and that work for all.
_SHARED = ("penstock-broadcast", "penstock-completion-waiter", "penstock-deliveries-renew", "penstock-deliveries-others")


class Everyone:
    """Knows two users, whatever the password, without the database."""

    async def authorize(self, credentials: Credentials | None) -> Principal:
        if credentials is None or credentials.user not in USERS:
            raise Refused
        return USERS[credentials.user]


@contextlib.contextmanager
def noting_statements() -> Iterator[None]:
    """Note the statements of requests, and not those of the server's own tasks, while the block lasts."""
    noted = [(Database, "fetch"), (ReadOnlyDatabase, "fetch"), (Transaction, "fetch"), (Transaction, "fetchrow")]
    before = [getattr(kind, name) for kind, name in noted]

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        async def fetch(self: Any, query: str, *args: Any, **options: Any) -> Any:
            task = asyncio.current_task()
            if (statements := _STATEMENTS.get()) is not None and task is not None and task.get_name() not in _SHARED:
                statements.append(" ".join(query.split()))
            return await call(self, query, *args, **options)

        return fetch

    for (kind, name), call in zip(noted, before, strict=True):
        setattr(kind, name, noting(call))
    try:
        yield
    finally:
        for (kind, name), call in zip(noted, before, strict=True):
            setattr(kind, name, call)


class Tenants:
    """The application, asked as one of the users."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def ask(self, user: str, method: str, url: str, **options: Any) -> tuple[httpx.Response, list[str]]:
        """The answer to a request, and the statements that it took. A WebSocket is asked for by the method SOCKET."""
        token = _STATEMENTS.set(statements := [])
        try:
            if method == "SOCKET":
                return await self._handshake(user, url, options.get("params") or {}), statements
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://penstock", auth=(user, "-"), timeout=60) as client:
                return await client.request(method, url, **options), statements
        finally:
            _STATEMENTS.reset(token)

    async def _handshake(self, user: str, url: str, params: dict[str, Any]) -> httpx.Response:
        """The answer to the handshake of a WebSocket; 101 with the frames when it is accepted, which ends by itself."""
        auth = b"Basic " + base64.b64encode(f"{user}:-".encode())
        path = httpx.URL(url)
        scope = {
            "type": "websocket", "path": path.path, "raw_path": path.raw_path.partition(b"?")[0],
            "query_string": str(httpx.QueryParams(params)).encode(),
            "headers": [(b"host", b"penstock"), (b"authorization", auth)],
            "client": ("127.0.0.1", 1), "server": ("penstock", 80), "scheme": "ws", "subprotocols": [], "http_version": "1.1",
            "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        said: list[Message] = []
        first = [{"type": "websocket.connect"}]

        async def receive() -> Message:
            if first:
                return first.pop()
            await asyncio.sleep(3600)
            raise AssertionError

        async def send(message: Message) -> None:
            said.append(message)

        await self._app(scope, receive, send)
        if said[0]["type"] == "websocket.accept":
            return httpx.Response(101, text=" ".join(message.get("text", "") for message in said[1:]))
        return httpx.Response(said[0]["status"], content=said[1]["body"])


@asynccontextmanager
async def tenants(url: str) -> AsyncIterator[Tenants]:
    """The application on a database."""
    settings = HttpSettings(longest_live=0.2, longest_wait=0.2, token=None)
    penstock = Penstock(url)
    app = create_app(penstock, Everyone(), settings)
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    started, stopped = asyncio.Event(), asyncio.Event()
    failed: list[Message] = []

    async def send(message: Message) -> None:
        if message["type"].endswith("failed"):
            failed.append(message)
        (started if "startup" in message["type"] else stopped).set()

    with noting_statements():
        running = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, inbox.get, send))
        inbox.put_nowait({"type": "lifespan.startup"})
        await started.wait()
        assert not failed
        try:
            yield Tenants(app)
        finally:
            inbox.put_nowait({"type": "lifespan.shutdown"})
            await stopped.wait()
            await running


_VARIES = [
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "UUID"),
    (re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+(Z|\+00:00)"), "TIME"),
    # Of what a request made of the user's own.
    (re.compile(r'"(seq|offset|next_offset|lease|last_seq|slot|oldest_ready_s)":\s*[0-9.]+'), r'"\1":0'),
    # Claims take whichever of the user's own jobs is first.
    (re.compile('"status":"in-progress"'), '"status":"queued"'),
    (re.compile(r"q[0-9]+:[0-9]+:"), "CURSOR"),
]


def bare(answer: httpx.Response, said: str) -> tuple[int, str, str]:
    """Status, outcome and body of an answer, without the time, new ids, and what the request itself says."""
    text = answer.text
    number = said.rpartition(":")[2]
    words = {said, quote(said, safe=""), said.removeprefix("job_"), said.lower(), number}
    for word in sorted(words - {""}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){word}(?!\w)", "SAID", text) if word.isdigit() else text.replace(word, "SAID")
    for pattern, sign in _VARIES:
        text = pattern.sub(sign, text)
    return answer.status_code, answer.headers.get("penstock-outcome", ""), text
