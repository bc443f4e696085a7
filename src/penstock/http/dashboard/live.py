"""A page that stays current: Server-Sent Events, each with the whole content of the page when it has changed.

The browser morphs what it shows into what it gets, so nothing else needs to know what changed. A page is looked at when a reading
of it is due. When that reading is what it was, the page is neither rendered nor sent: the browser gets only the time at which it
was read, which is no part of the version of a content.

A page that cannot be read is looked at again after two seconds; one that the database works on until it gives up, after pauses
that grow. A reader who loads the page again does not wait for these.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.http.errors import ApiError, from_penstock

_SHORTEST_PAUSE_S = 1.0
_AFTER_PROBLEM_S = 2.0
# What fails after so long has cost the database as much.
_SLOW_S = 1.0
_LONGEST_PAUSE_S = 120.0
_KEEP_ALIVE_S = 15.0
_LONGEST_SEND_S = 30.0
_ENDED = b"event: gone\ndata: {}\n\n"
# The time at which a page was read, which parts.html marks.
_READ = re.compile(r"<span data-read>.*?</span>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Looked:
    """What a page shows now.

    Attributes:
        content: The content.
        due_in_s: In how many seconds a reading of it is due again.
        read_at: When the oldest of its readings was read; None: it has none.
        problem: Whether one of its readings could not be read again.
    """

    content: str
    due_in_s: float
    read_at: datetime | None
    problem: bool = False


def version_of(content: str) -> str:
    """A short name of a content, by which the browser says what it shows already. The time of the reading is no part of it."""
    return hashlib.blake2b(_READ.sub("", content).encode(), digest_size=12).hexdigest()


async def events(
    look: Callable[[], Awaitable[Looked]], seen: str, stopping: asyncio.Event, lasts_s: float
) -> AsyncGenerator[bytes, None]:
    """The events of one connection.

    Args:
        look: What the page shows now. Raises `ApiError` 401 when the session has ended.
        seen: Version of the content that the browser shows.
        stopping: Ends the connection.
        lasts_s: How long it lasts; the browser connects again.
    """
    ends_at = time.monotonic() + lasts_s
    sent_at = time.monotonic()
    problem, slow = "", 0
    read_at: datetime | None = None
    yield b"retry: 1000\n\n"
    while time.monotonic() < ends_at and not stopping.is_set():
        looked, began = None, time.monotonic()
        try:
            looked = await look()
            version = version_of(looked.content)
            if version != seen or problem:
                seen, problem, sent_at = version, "", time.monotonic()
                yield b"id: %s\nevent: page\ndata: %s\n\n" % (
                    version.encode(),
                    orjson.dumps({"html": looked.content, "version": version}),
                )
            elif looked.read_at is not None and looked.read_at != read_at:
                sent_at = time.monotonic()
                yield b"event: read\ndata: %s\n\n" % orjson.dumps({"at": looked.read_at})
            read_at = looked.read_at
        except PenstockError as error:
            answer: ApiError = from_penstock(error)
            if answer.status in (401, 403, 404):
                yield _ENDED
                return
            if answer.message != problem:
                problem, sent_at = answer.message, time.monotonic()
                yield b"event: problem\ndata: %s\n\n" % orjson.dumps({"title": problem})
        if looked is not None and not looked.problem:
            slow, pause = 0, max(looked.due_in_s, _SHORTEST_PAUSE_S)
        else:
            slow = slow + 1 if time.monotonic() - began > _SLOW_S else 0
            pause = min(_AFTER_PROBLEM_S * 2**slow, _LONGEST_PAUSE_S)
        if time.monotonic() - sent_at > _KEEP_ALIVE_S:
            sent_at = time.monotonic()
            yield b": keep-alive\n\n"
        try:
            async with asyncio.timeout(max(min(pause, ends_at - time.monotonic()), 0.01)):
                await stopping.wait()
        except TimeoutError:
            continue


class LiveAnswer(Response):
    """An answer of Server-Sent Events that ends with its client.

    Args:
        frames: The events.
        closed: Called at the end.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], closed: Callable[[], None]) -> None:
        # Proxies that gather answers would hold events back.
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until one side ends the connection."""
        sending = asyncio.create_task(self._send(send), name="penstock-dashboard-live")
        leaving = asyncio.create_task(_left(receive), name="penstock-dashboard-live-end")
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
            results = await asyncio.gather(sending, leaving, return_exceptions=True)
            self._closed()
        if isinstance(results[0], Exception) and not isinstance(results[0], TimeoutError):
            raise results[0]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                # A client that reads nothing for so long is treated as disconnected.
                async with asyncio.timeout(_LONGEST_SEND_S):
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
