"""Answers that go on: Server-Sent Events, one after another until the client leaves or the server stops.

The frames come from an async iterator. It is closed whatever ends the connection, so what it holds is given back at once;
and it is asked for more only when the socket has taken what came before, so a slow client costs one frame of memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from typing import Any

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from penstock.core.logs import get_logger
from penstock.errors import PenstockError
from penstock.http.errors import ApiError, from_penstock
from penstock.http.live_access import ENDED
from penstock.http.paths import is_head
from penstock.http.service import Service

log = get_logger("penstock.http")
KEEP_ALIVE = b": keep-alive\n\n"
_FRAME = 1 << 16
_LONGEST_SEND_S = 60.0
_LAST_WORD_S = 5.0


class EventStream(Response):
    """An answer of Server-Sent Events.

    Args:
        service: Of the running server.
        kind: Of the connection, for the metrics.
        frames: Complete events as bytes.
        close: Called at the end, whatever came of it.
    """

    media_type = "text/event-stream"

    def __init__(
        self, service: Service, kind: str, frames: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        # Proxies that gather answers would hold events back.
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._service = service
        self._kind = kind
        self._frames = frames
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until one side ends it; for a HEAD only the headers."""
        if is_head(scope):
            await self._frames.aclose()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if self._close is not None:
                await self._close()
            return
        sending = asyncio.create_task(self._send(send), name="penstock-live")
        leaving = asyncio.create_task(_left(receive), name="penstock-live-end")
        with self._service.live(self._kind), scope["call"].watching() as watch:
            refusing = asyncio.create_task(watch.ended.wait(), name="penstock-live-access-end")
            tasks = (sending, leaving, refusing)
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if self._close is not None:
                    await self._close()
            if done == {refusing}:
                await _refuse(send)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._frames) as frames:
            try:
                async for frame in frames:
                    # A client that takes nothing for so long is gone, or as good as gone.
                    async with asyncio.timeout(_LONGEST_SEND_S):
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
            except TimeoutError:
                log.info("live_client_stuck", kind=self._kind)
                return
            except PenstockError as error:
                await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _refuse(send: Send) -> None:
    """End a connection whose user may no longer receive."""
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(_LAST_WORD_S):
            await send({"type": "http.response.body", "body": ending(ENDED), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: bytes, *, id: str | None = None, name: str | None = None) -> bytes:
    """One event; `data` is JSON without line ends."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    if id is not None:
        head += b"id: %s\n" % id.encode()
    return head + b"data: " + data + b"\n\n"


def beginning() -> bytes:
    """What comes first: how soon to come back when the connection breaks."""
    return b"retry: 1000\n\n"


def ending(reason: str) -> bytes:
    """The last event of a connection that the server ends: come back with `Last-Event-ID`."""
    return event(orjson.dumps({"title": reason}), name="end")


def error_event(error: PenstockError) -> bytes:
    """An error that ends a connection under way: `gone` when what comes next is no longer there, else `failed`."""
    answer: ApiError = from_penstock(error)
    name = "gone" if answer.id in ("offset_gone", "conflict") else "failed"
    return event(orjson.dumps(answer.as_dict()), name=name)


def packed(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Frames put together, so that many small ones are one write. Those of a write are asked for just before it."""
    gathered: list[bytes] = []
    size = 0
    for frame in frames:
        gathered.append(frame)
        size += len(frame)
        if size >= _FRAME:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


def last_event_id(headers: Any) -> str | None:
    """What a client that comes back says it saw last."""
    given = headers.get("last-event-id")
    return given.strip() or None if given is not None else None
