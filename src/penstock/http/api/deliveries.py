"""Receiving a topic: a connection that is a subscriber, as Server-Sent Events or as a WebSocket with acknowledgements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from fastapi import Header, Query, Request, Response, WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from penstock.errors import InvalidInput, PenstockError
from penstock.http import live
from penstock.http.api.common import error_answer, needs, router, service_of
from penstock.http.api.topics import TopicName
from penstock.http.auth import Principal, Role
from penstock.http.deliveries import LIVING
from penstock.http.errors import from_penstock, invalid_parameter
from penstock.http.inbox import Copy, Inbox
from penstock.http.live import EventStream
from penstock.http.paths import is_head
from penstock.http.service import Service
from penstock.http.sockets import SUBPROTOCOL
from penstock.job import Outcome
from penstock.message import Subscribed
from penstock.payload import dump_json, storable

api = router("topics")
_PATH = "/v1/topics/{topic:name}/deliveries"
_WINDOW = 100
_LONGEST_SEND_S = 60.0
_DELIVERED = (
    'retry: 1000\n\nevent: subscribed\ndata: {"client_id":"browser-17","seq":41,...}\n\n'
    'id: 42\ndata: {"seq":42,"id":"0190b7a0-...","published_at":"2026-01-11T18:26:26Z","data":{"minutes":12}}\n\n'
)
Client = Annotated[
    str | None,
    Query(description="As whom; none: a new name for this connection.", examples=["browser-17"], min_length=1, max_length=200),
]
Stay = Annotated[bool, Query(description="Whether the subscription stays when the connection has ended. Needs client_id.")]
Ttl = Annotated[
    float | None,
    Query(ge=1, le=2_592_000, description="Seconds that a subscription that stays outlives its connection; none: no end."),
]
Filter = Annotated[
    str | None, Query(description="Only messages that contain this JSON.", examples=['{"dest": "JFK"}'], max_length=10_000)
]
Since = Annotated[
    int | None, Query(ge=0, le=9_000_000_000_000_000_000, description="Number of the last message that the client saw.")
]


@api.get(
    _PATH,
    response_class=Response,
    responses={200: {"description": "Messages as they come.", "content": {"text/event-stream": {"example": _DELIVERED}}}},
)
@needs(Role.WORK)
async def receive(
    request: Request,
    topic: TopicName,
    client_id: Client = None,
    stay: Stay = False,
    ttl_s: Ttl = None,
    filter: Filter = None,
    since: Since = None,
    last_event_id: Annotated[
        str | None, Header(description="The `id` of the last event, for a client that comes back.", max_length=40)
    ] = None,
) -> Response:
    """Receive a topic as Server-Sent Events; the connection is a subscriber, whose subscription ends with it or stays.

    The `id` of an event is the number of the message, after the latest number when it comes late (`43-5`). A client that comes
    back with it in `Last-Event-ID` gets what it missed, each message once. 409 when some of that is gone. The same path takes
    a WebSocket, on which messages are acknowledged.
    """
    service = service_of(request)
    principal: Principal = request.scope["principal"]
    seen, last = (since, None) if last_event_id is None else _seen(last_event_id)
    inbox = _inbox(principal, request.url.path, topic, client_id, stay, ttl_s, filter, alone=stay)
    service.check_room()
    if is_head(request.scope):
        # A look must not take messages.
        return Response(media_type="text/event-stream", headers={"cache-control": "no-store"})
    receipt = await service.deliveries.open(inbox, seen, last)
    frames = _frames(service, inbox, receipt, seen)
    return EventStream(service, "topic", frames, lambda: service.deliveries.close(inbox))


async def _frames(service: Service, inbox: Inbox, receipt: Subscribed, seen: int | None) -> AsyncGenerator[bytes, None]:
    keep_alive = service.settings.live_keep_alive.total_seconds()
    until = time.monotonic() + service.settings.longest_live.total_seconds()
    # Another server may have handed out something to a connection of this client that was dead already.
    looks = 2 if inbox.alone and seen is not None else 0
    latest = seen or 0
    yield live.beginning() + live.event(_subscribed(receipt), name="subscribed")
    while not inbox.ended and (left := until - time.monotonic()) > 0:
        if not await inbox.wait(min(left, keep_alive)):
            yield live.KEEP_ALIVE
            if looks:
                looks -= 1
                await inbox.look_for_missed(service.database)
        copies = inbox.take(_WINDOW)
        events = []
        late = None
        # What comes late, such as one that was put off, does not make the client go back. Its number says what it has of those.
        for seq, body in inbox.missed():
            latest = max(latest, seq)
            late = seq if seq < latest else late
            events.append(live.event(body, id=str(latest) if late is None else f"{latest}-{late}"))
        for copy in copies:
            if not inbox.was_seen(copy, seen) and inbox.is_new(copy):
                latest = max(latest, copy.seq)
                events.append(live.event(copy.body, id=str(latest) if copy.seq == latest else f"{latest}-{copy.seq}"))
        for frame in live.packed(events):
            yield frame
        # Written: from here on the client has it, or comes back and says what it saw last.
        for copy in copies:
            if inbox.settled(copy.job):
                service.deliveries.done(copy)
        if events:
            service.metrics.delivered(inbox.topic, "events", len(events))
        if copies:
            service.deliveries.room_made()
    if inbox.error is not None:
        yield live.error_event(inbox.error)
    else:
        yield live.ending(inbox.ended or "the connection is as old as it may get")


@api.websocket(_PATH)
@needs(Role.WORK)
async def receive_by_socket(
    websocket: WebSocket,
    topic: TopicName,
    client_id: Client = None,
    stay: Stay = False,
    ttl_s: Ttl = None,
    filter: Filter = None,
    since: Since = None,
    ack: Annotated[Literal["client", "auto"], Query(description="auto: what was written counts as received.")] = "client",
    window: Annotated[int, Query(ge=1, le=1_000, description="Most messages that are not acknowledged.")] = _WINDOW,
) -> None:
    """Receive a topic on a WebSocket: `docs/http.md` has the frames."""
    service: Service = websocket.scope["service"]
    principal: Principal = websocket.scope["principal"]
    path = websocket.url.path
    try:
        service.check_room()
        alone = stay and ack == "auto"
        inbox = _inbox(principal, path, topic, client_id, stay, ttl_s, filter, alone=alone, window=window)
        receipt = await service.deliveries.open(inbox, since)
    except PenstockError as error:
        await websocket.send_denial_response(error_answer(from_penstock(error, path)))
        return
    try:
        with service.live("socket"):
            chosen = SUBPROTOCOL if SUBPROTOCOL in websocket.scope.get("subprotocols", ()) else None
            await websocket.accept(chosen)
            await _Conversation(service, websocket, inbox, receipt, since, ack == "auto").run()
    finally:
        await service.deliveries.close(inbox)


class _Conversation:
    """One WebSocket: what is written, and what the client says."""

    def __init__(
        self, service: Service, websocket: WebSocket, inbox: Inbox, receipt: Subscribed, seen: int | None, auto: bool
    ) -> None:
        self._service = service
        self._socket = websocket
        self._inbox = inbox
        self._receipt = receipt
        self._seen = seen
        self._auto = auto
        self._jobs: dict[UUID, UUID] = {}  # of the copies at hand, by message
        self._messages: dict[UUID, UUID] = {}

    async def run(self) -> None:
        writing = asyncio.create_task(self._write(), name="penstock-socket-write")
        listening = asyncio.create_task(self._listen(), name="penstock-socket-read")
        try:
            done, _ = await asyncio.wait([writing, listening], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                with suppress(WebSocketDisconnect, TimeoutError, PenstockError):
                    task.result()
        finally:
            writing.cancel()
            listening.cancel()
            await asyncio.gather(writing, listening, return_exceptions=True)
        if self._socket.application_state is WebSocketState.CONNECTED:
            with suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
                async with asyncio.timeout(5):
                    await self._socket.close(1001 if self._inbox.error is None else 1011, (self._inbox.ended or "")[:100])

    async def _write(self) -> None:
        inbox, service = self._inbox, self._service
        until = time.monotonic() + service.settings.longest_live.total_seconds()
        await self._send(_typed("subscribed", _subscribed(self._receipt)))
        while not inbox.ended and (left := until - time.monotonic()) > 0:
            await inbox.wait(left)
            sent = 0
            for _, body in inbox.missed():
                await self._send(_typed("message", body))
                sent += 1
            for copy in inbox.take(_WINDOW):
                sent += await self._deliver(copy)
            for job in list(inbox.late):
                inbox.late.popleft()
                if (message := self._messages.pop(job, None)) is not None:
                    await self._send(orjson.dumps({"type": "stale", "id": str(message)}))
            if sent:
                service.metrics.delivered(inbox.topic, "socket", sent)
        if inbox.error is not None:
            answer = from_penstock(inbox.error)
            await self._send(orjson.dumps({"type": "gone", **answer.as_dict()}))
        else:
            await self._send(orjson.dumps({"type": "end", "title": inbox.ended or "the connection is as old as it may get"}))

    async def _deliver(self, copy: Copy) -> int:
        """Write one copy, unless the client has it. Returns how many were written."""
        if self._auto:
            new = not self._inbox.was_seen(copy, self._seen) and self._inbox.is_new(copy)
            if new:
                await self._send(_typed("message", copy.body))
            if self._inbox.settled(copy.job):
                self._service.deliveries.done(copy)
                self._service.deliveries.room_made()
            return int(new)
        self._jobs[copy.id] = copy.job
        await self._send(_typed("message", copy.body, attempt=copy.attempt))
        return 1

    async def _listen(self) -> None:
        while True:
            received = await self._socket.receive()
            if received["type"] == "websocket.disconnect":
                return
            if (text := received.get("text")) is None:
                # Frames are JSON text: another protocol, or a mistake.
                await self._socket.close(1003, "a frame is JSON text, not binary")
                return
            try:
                self._heard(orjson.loads(text))
            except (orjson.JSONDecodeError, InvalidInput) as error:
                message = error.message if isinstance(error, InvalidInput) else "the frame is not JSON"
                await self._send(orjson.dumps({"type": "error", "id": "invalid_request", "title": message}))

    def _heard(self, frame: Any) -> None:
        kind = frame.get("type") if isinstance(frame, dict) else None
        if kind not in ("ack", "fail"):
            raise InvalidInput('a frame is {"type": "ack", "id": ...} or {"type": "fail", "id": ..., "error": ...}')
        try:
            id = UUID(frame.get("id"))
        except (ValueError, TypeError, AttributeError):
            raise InvalidInput("the frame needs the id of a message") from None
        # One that is not at hand was acknowledged before, or is another's by now.
        job = self._jobs.pop(id, None)
        copy = None if job is None else self._inbox.settled(job)
        if copy is None:
            raise InvalidInput(f"message {id} does not wait for an acknowledgement here")
        if kind == "ack":
            result = frame.get("result")
            outcome, detail = Outcome.SUCCEEDED, None if result is None else dump_json(result, "the result")
        else:
            reason = frame.get("error", "the receiver gave no reason")
            told = reason if isinstance(reason, dict) else {"type": "Failed", "message": str(reason)[:2_000]}
            outcome = Outcome.FAILED_FOR_GOOD if frame.get("retry") is False else Outcome.FAILED
            detail = storable(dump_json(told, "the error"), "the error")
        self._messages[copy.job] = copy.id
        while len(self._messages) > 1_000:
            self._messages.pop(next(iter(self._messages)))
        self._inbox.expect(copy.job)
        self._service.deliveries.done(copy, outcome, detail)
        self._service.deliveries.room_made()

    async def _send(self, frame: bytes) -> None:
        async with asyncio.timeout(_LONGEST_SEND_S):
            await self._socket.send_text(frame.decode())


def _inbox(
    principal: Principal, path: str, topic: str, client_id: str | None, stay: bool, ttl_s: float | None, filter: str | None,
    *, alone: bool, window: int = _WINDOW,
) -> Inbox:  # fmt: skip
    """The inbox of a new connection. Raises `ApiError` 400, 403."""
    principal.require(topic, path, "topic")
    if stay and client_id is None:
        raise invalid_parameter("A subscription that stays needs a client_id", path, "Add client_id=...")
    if not stay and ttl_s is not None:
        raise invalid_parameter("ttl_s is for subscriptions that stay", path, "Add stay=true, or leave it out")
    if filter is not None:
        try:
            filter = dump_json(orjson.loads(filter), "a filter")
        except orjson.JSONDecodeError:
            raise invalid_parameter("Invalid filter", path, 'Write JSON, such as {"dest": "JFK"}') from None
    living = None if ttl_s is None else timedelta(seconds=ttl_s)
    return Inbox(topic, client_id, ttl=living if stay else LIVING, filter=filter, stays=stay, window=window, alone=alone)


def _seen(last_event_id: str) -> tuple[int, int | None]:
    """The latest message that a client saw, and the one that it saw last when that one came late."""
    latest, dash, last = last_event_id.partition("-")
    if not all(one.isdecimal() and len(one) <= 18 for one in ((latest, last) if dash else (latest,))):
        raise invalid_parameter(f"Invalid Last-Event-ID: {last_event_id}", detail="It is the number of a message")
    return int(latest), int(last) if dash else None


def _subscribed(receipt: Subscribed) -> bytes:
    return orjson.dumps({
        "client_id": receipt.client_id, "queue": receipt.queue, "created": receipt.created, "seq": receipt.seq,
        "replayed": receipt.replayed,
    })  # fmt: skip


def _typed(kind: str, body: bytes, **more: Any) -> bytes:
    """A frame: a JSON object with its type before its other fields."""
    return orjson.dumps({"type": kind, **more})[:-1] + b"," + body[1:]
