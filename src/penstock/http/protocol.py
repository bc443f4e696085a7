"""uvicorn's protocol with limits that it lacks: on what a connection may take before its user is authenticated.

    head     a request line with its headers has a time and a size, from the connection or the answer before on
    rest     what a client still sends when its answer is complete is thrown away, for as long as a head may take
    answer   a client that reads nothing of its answer for a while is cut off
    number   of connections, and of requests that a connection sends ahead

uvicorn ends idle connections (`timeout_keep_alive`), but any byte stops that clock. What is not HTTP at all is answered in the
shape of the API's errors.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from penstock._version import __version__
from penstock.http.errors import JSON, ApiError
from penstock.http.origin import PLAIN
from penstock.http.settings import HttpSettings

_LARGEST_HEAD = 64 << 10
# A chunk of one byte has five more around it.
_FRAMING = 8
_MOST_AHEAD = 1_000
_SECURITY = b"".join(b"%s: %s\r\n" % header for header in PLAIN)


@functools.cache
def _settings() -> HttpSettings:
    """Those of this process, from the environment: uvicorn makes the protocol by itself."""
    return HttpSettings.read()


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._settings = _settings()
        # The clock of what is expected: a head, or the rest of a request that is answered already.
        self._clock: asyncio.TimerHandle | None = None
        self._in_head = True
        self._lingering = False
        self._read_to_end = True
        # Whether it becomes a WebSocket: from then on this object receives no more calls.
        self._upgrading = False
        # Bytes since the last head was complete that were no body.
        self._extra = 0
        self._write_clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            self._refuse(ApiError(503, "service_unavailable", "Too many connections. Please try again", in_body=True))
        else:
            self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_clock()
        self._stop_write_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Something came."""
        self._extra += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._lingering or self._upgrading:
            return
        if self._extra > _LARGEST_HEAD:
            if self._in_head:
                self._refuse(
                    ApiError(431, "head_too_large", f"The headers are too large ({_LARGEST_HEAD} bytes max)", in_body=True)
                )
            else:
                self.transport.abort()
        elif self._read_to_end and (self.cycle is None or self.cycle.response_complete):
            # Empty lines: they stopped uvicorn's timer, and no answer follows them.
            self._start_clock()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._read_to_end = False
        self._in_head = True
        self._start_clock()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after a body, which no part reads."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are there."""
        self._stop_clock()
        self._in_head = False
        self._extra = 0
        super().on_headers_complete()
        self._upgrading = self.parser.should_upgrade() and self._should_upgrade()
        if self._upgrading:
            return
        if not self.cycle.keep_alive:
            self.cycle.transport = _Lingering(self)  # type: ignore[assignment]
        if len(self.pipeline) > _MOST_AHEAD:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._extra = max(0, self._extra - (1 + _FRAMING) * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request was read up to its end."""
        self._read_to_end = True
        self._extra = 0
        super().on_message_complete()
        if not self._lingering:
            return
        self._lingering = False
        self._stop_clock()
        if self.cycle.keep_alive:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """An answer is written."""
        super().on_response_complete()
        if not self._read_to_end and not self.pipeline and not self.transport.is_closing():
            self.linger()

    def linger(self) -> None:
        """Throw away the rest of a request that is answered, such as one that is too large.

        A connection that is closed while the client still writes is reset, and the client may never see the answer.
        """
        self._unset_keepalive_if_required()
        self._lingering = True
        self._start_clock()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        """It reads."""
        self._stop_write_clock()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        self._refuse(ApiError(400, "invalid_request", msg, in_body=True))

    def _start_clock(self) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(self._settings.head_timeout.total_seconds(), self._too_slow)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _too_slow(self) -> None:
        self._clock = None
        if self._lingering:
            self.transport.abort()
        elif self.cycle is not None and not self.cycle.response_complete:
            # The beginning of a request that was sent ahead; the client is not read from now.
            self._start_clock()
        elif self._read_to_end:
            self.transport.close()
        else:
            self._refuse(ApiError(408, "request_timeout", "The request did not arrive in time", in_body=True))

    def _watch_writing(self, left_before: int) -> None:
        self._stop_write_clock()
        left = self.transport.get_write_buffer_size()
        if left < left_before:
            self._write_clock = self.loop.call_later(self._settings.write_timeout.total_seconds(), self._watch_writing, left)
        else:
            self.transport.abort()

    def _stop_write_clock(self) -> None:
        if self._write_clock is not None:
            self._write_clock.cancel()
            self._write_clock = None

    def _refuse(self, error: ApiError) -> None:
        self._stop_clock()
        body = error.body()
        head = b"%scontent-type: %s\r\ncontent-length: %d\r\nserver: penstock/%s\r\n%sconnection: close\r\n\r\n"
        self.transport.write(head % (STATUS_LINE[error.status], JSON, len(body), __version__.encode(), _SECURITY) + body)
        self.transport.close()


class SocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket that its route ends when the server stops: `end` comes first, then what the client is told at the close.

    uvicorn closes it at once, before messages that are being written. It waits for the route for as long as for requests.
    """

    def shutdown(self) -> None:
        """The server stops."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()


class _Lingering:
    """The transport of an answer after which the connection is closed: not before the request was read."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        """Close, or say that nothing more is written, and linger."""
        protocol = self._protocol
        if protocol._read_to_end or protocol.transport.is_closing() or not protocol.transport.can_write_eof():
            protocol.transport.close()
        else:
            protocol.transport.write_eof()
            protocol.linger()
