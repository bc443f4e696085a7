"""Receiving a topic: a connection that is a subscriber, as Server-Sent Events or as a WebSocket with acknowledgements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from fastapi import Header, Query, Request, Response, WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from penstock.core.serialization import dump_json, storable
from penstock.errors import InvalidInput, PenstockError
from penstock.http import sse as live
from penstock.http.auth import Role
from penstock.http.errors import from_penstock, invalid_parameter
from penstock.http.live_access import ENDED, Watch
from penstock.http.paths import is_head
from penstock.http.routing import WORK, CurrentService, Instance, User, error_answer, router
from penstock.http.service import Service
from penstock.http.sse import EventStream
from penstock.http.topics.deliveries import LIVING, Deliveries
from penstock.http.topics.delivery_buffer import Copy, DeliveryBuffer
from penstock.http.topics.routes import OpenTopic, TopicName
from penstock.http.websocket import SUBPROTOCOL, authorization_of
from penstock.jobs.models import Outcome
from penstock.topics.models import Subscribed

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
    dependencies=[WORK],
    response_class=Response,
    responses={200: {"description": "Messages as they come.", "content": {"text/event-stream": {"example": _DELIVERED}}}},
)
async def receive(
    request: Request,
    topic: OpenTopic,
    service: CurrentService,
    path: Instance,
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
    seen, last = (since, None) if last_event_id is None else _seen(last_event_id)
    buffer = _buffer(path, topic, client_id, stay, ttl_s, filter, alone=stay)
    service.check_room()
    if is_head(request.scope):
        # A look must not take messages.
        return Response(media_type="text/event-stream", headers={"cache-control": "no-store"})
    receipt = await service.part(Deliveries).open(buffer, seen, last)
    frames = _frames(service, buffer, receipt, seen)
    return EventStream(service, "topic", frames, lambda: service.part(Deliveries).close(buffer))


async def _frames(service: Service, buffer: DeliveryBuffer, receipt: Subscribed, seen: int | None) -> AsyncGenerator[bytes, None]:
    keep_alive = service.settings.live_keep_alive.total_seconds()
    until = time.monotonic() + service.settings.longest_live.total_seconds()
    # Another server may have handed out something to a connection of this client that was dead already.
    looks = 2 if buffer.alone and seen is not None else 0
    numbers = _Numbers(seen or 0)
    yield live.beginning() + live.event(_subscribed(receipt), name="subscribed")
    while not buffer.ended and (left := until - time.monotonic()) > 0:
        if not await buffer.wait(min(left, keep_alive)):
            yield live.KEEP_ALIVE
            if looks:
                looks -= 1
                await buffer.look_for_missed(service.database)
        missed, copies = await buffer.missed(service.database), buffer.take(_WINDOW)
        for frame in live.packed(_events(service, buffer, numbers, missed, copies)):
            yield frame
        if copies:
            service.part(Deliveries).room_made()
    if buffer.error is not None:
        yield live.error_event(buffer.error)
    else:
        yield live.ending(buffer.ended or "the connection is as old as it may get")


class _Numbers:
    """The ids of events. What comes late, such as one that was put off, does not make the client go back.

    Args:
        latest: The latest message that the client has.
    """

    def __init__(self, latest: int) -> None:
        self._latest = latest
        self._late: int | None = None

    def of(self, seq: int) -> str:
        """The latest number; for one that comes late, what the client has of those as well."""
        self._late = None
        self._latest = max(self._latest, seq)
        return str(self._latest) if seq == self._latest else f"{self._latest}-{seq}"

    def of_missed(self, seqs: Iterable[int]) -> Iterator[str]:
        """Those that were missed, the late ones first: as long as some of them follow, it is known which ones."""
        for seq in seqs:
            self._latest = max(self._latest, seq)
            self._late = seq if seq < self._latest else self._late
            yield str(self._latest) if self._late is None else f"{self._latest}-{self._late}"


def _events(
    service: Service, buffer: DeliveryBuffer, numbers: _Numbers, missed: Sequence[tuple[int, bytes]], copies: Sequence[Copy]
) -> Iterator[bytes]:
    """Events that are about to be written.

    Whether the client gets one can only be told by the client, from here on: it has it, or comes back and says what it saw last.
    So its copy counts as received now, and not when it is written. A copy that went back to the queue was never written.
    """
    written = len(missed)
    for id, (_, body) in zip(numbers.of_missed(seq for seq, _ in missed), missed, strict=True):
        yield live.event(body, id=id)
    for copy in copies:
        # Another connection that took over may have had it given back.
        if buffer.settled(copy.job) is None:
            continue
        service.part(Deliveries).done(copy)
        if not buffer.was_seen(copy) and buffer.is_new(copy):
            written += 1
            yield live.event(copy.body, id=numbers.of(copy.seq))
    if written:
        service.metrics.delivered(buffer.topic, "events", written)


@api.websocket(_PATH, dependencies=[WORK])
async def receive_by_socket(
    websocket: WebSocket,
    topic: TopicName,
    user: User,
    service: CurrentService,
    path: Instance,
    client_id: Client = None,
    stay: Stay = False,
    ttl_s: Ttl = None,
    filter: Filter = None,
    since: Since = None,
    ack: Annotated[Literal["client", "auto"], Query(description="auto: what was written counts as received.")] = "client",
    window: Annotated[int, Query(ge=1, le=1_000, description="Most messages that are not acknowledged.")] = _WINDOW,
) -> None:
    """Receive a topic on a WebSocket: `docs/http.md` has the frames."""
    try:
        user.require(topic, path, "topic")
        service.check_room()
        alone = stay and ack == "auto"
        buffer = _buffer(path, topic, client_id, stay, ttl_s, filter, alone=alone, window=window)
        receipt = await service.part(Deliveries).open(buffer, since)
    except PenstockError as error:
        await websocket.send_denial_response(error_answer(from_penstock(error, path)))
        return
    try:
        header = authorization_of(websocket.scope)
        with service.live("socket"), service.access.watching(user, Role.WORK, header) as watch:
            chosen = SUBPROTOCOL if SUBPROTOCOL in websocket.scope.get("subprotocols", ()) else None
            await websocket.accept(chosen)
            await _Conversation(service, websocket, buffer, receipt, ack == "auto").run(watch)
    finally:
        await service.part(Deliveries).close(buffer)


class _Conversation:
    """One WebSocket: what is written, and what the client says."""

    def __init__(self, service: Service, websocket: WebSocket, buffer: DeliveryBuffer, receipt: Subscribed, auto: bool) -> None:
        self._service = service
        self._socket = websocket
        self._buffer = buffer
        self._receipt = receipt
        self._auto = auto
        self._jobs: dict[UUID, UUID] = {}  # of the unacknowledged copies, by message
        self._messages: dict[UUID, UUID] = {}

    async def run(self, watch: Watch) -> None:
        writing = asyncio.create_task(self._write(), name="penstock-socket-write")
        listening = asyncio.create_task(self._listen(), name="penstock-socket-read")
        refusing = asyncio.create_task(watch.ended.wait(), name="penstock-socket-access-end")
        try:
            done, _ = await asyncio.wait([writing, listening, refusing], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                with suppress(WebSocketDisconnect, TimeoutError, PenstockError):
                    task.result()
        finally:
            writing.cancel()
            listening.cancel()
            refusing.cancel()
            await asyncio.gather(writing, listening, refusing, return_exceptions=True)
        if self._socket.application_state is WebSocketState.CONNECTED:
            with suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
                async with asyncio.timeout(5):
                    if watch.ended.is_set():
                        await self._socket.close(1008, ENDED)
                        return
                    await self._socket.close(1001 if self._buffer.error is None else 1011, (self._buffer.ended or "")[:100])

    async def _write(self) -> None:
        buffer, service = self._buffer, self._service
        until = time.monotonic() + service.settings.longest_live.total_seconds()
        await self._send(_typed("subscribed", _subscribed(self._receipt)))
        while not buffer.ended and (left := until - time.monotonic()) > 0:
            await buffer.wait(left)
            sent = 0
            for _, body in await buffer.missed(service.database):
                await self._send(_typed("message", body))
                sent += 1
            crowded = buffer.crowded
            for copy in buffer.take(_WINDOW):
                sent += await self._deliver(copy)
            if crowded:
                service.part(Deliveries).room_made()
            for job in list(buffer.late):
                buffer.late.popleft()
                if (message := self._messages.pop(job, None)) is not None:
                    await self._send(orjson.dumps({"type": "stale", "id": str(message)}))
            if sent:
                service.metrics.delivered(buffer.topic, "socket", sent)
        if buffer.error is not None:
            answer = from_penstock(buffer.error)
            await self._send(orjson.dumps({"type": "gone", **answer.as_dict()}))
        else:
            await self._send(orjson.dumps({"type": "end", "title": buffer.ended or "the connection is as old as it may get"}))

    async def _deliver(self, copy: Copy) -> int:
        """Write one copy, unless the client has it. Returns how many were written."""
        if self._auto:
            # As in `_events`: it counts as received before it is written.
            if self._buffer.settled(copy.job) is None:
                return 0
            self._service.part(Deliveries).done(copy)
            self._service.part(Deliveries).room_made()
            new = not self._buffer.was_seen(copy) and self._buffer.is_new(copy)
            if new:
                await self._send(_typed("message", copy.body))
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
        # A copy that is missing was acknowledged before, or belongs to another connection by now.
        job = self._jobs.pop(id, None)
        copy = None if job is None else self._buffer.settled(job)
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
        self._buffer.expect(copy.job)
        self._service.part(Deliveries).done(copy, outcome, detail)
        self._service.part(Deliveries).room_made()

    async def _send(self, frame: bytes) -> None:
        async with asyncio.timeout(_LONGEST_SEND_S):
            await self._socket.send_text(frame.decode())


def _buffer(
    path: str, topic: str, client_id: str | None, stay: bool, ttl_s: float | None, filter: str | None,
    *, alone: bool, window: int = _WINDOW,
) -> DeliveryBuffer:  # fmt: skip
    """The buffer of a new connection. Raises `ApiError` 400."""
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
    return DeliveryBuffer(topic, client_id, ttl=living if stay else LIVING, filter=filter, stays=stay, window=window, alone=alone)


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
