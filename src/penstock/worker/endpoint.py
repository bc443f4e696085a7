"""A small HTTP server for metrics and probes, in a thread with a loop of its own.

It answers while a handler blocks the worker's event loop, which is when an operator looks. It knows GET and HEAD of a few paths,
reads at most 8 KiB of a request within five seconds, serves 32 connections at once, and closes each after one answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from penstock.core.logs import get_logger
from penstock.errors import InvalidInput

log = get_logger("penstock.metrics")
_MOST_BYTES = 8_192
_READ_S = 5.0
_ANSWER_S = 30.0
_MOST_CONNECTIONS = 32
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: status, body, content type."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of an address such as `:9464` (loopback), `9464` or `0.0.0.0:9464`. Raises `InvalidInput`."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise InvalidInput(f"{text!r} is not an address", hint="Give [HOST]:PORT, such as :9464 or 0.0.0.0:9464.")
    return host or "127.0.0.1", int(port)


class Endpoint:
    """Serves routes until `close`.

    Args:
        address: Host and port; port 0: any free one.
        routes: What answers each path.
        closing: Called at the end, on the loop of the thread.

    Raises:
        InvalidInput: The address cannot be used.
    """

    def __init__(
        self,
        address: tuple[str, int],
        routes: Mapping[str, Callable[[], Awaitable[Answer]]],
        closing: Callable[[], Awaitable[None]],
    ) -> None:
        self._routes = routes
        self._closing = closing
        self._connections = 0
        try:
            self._socket = socket.create_server(address, family=_family(address[0]))
        except OSError as error:
            raise InvalidInput(
                f"cannot listen on {address[0]}:{address[1]}: {error.strerror or error}", hint="Give another --metrics address."
            ) from None
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-metrics", daemon=True)
        self._thread.start()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        log.info("metrics_served", url=f"http://{host}:{self.port}/metrics")

    def close(self) -> None:
        """Stop serving."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(_READ_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            log.error("metrics_ended", error=error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=_MOST_BYTES)
        await self._stopped.wait()
        server.close()
        with suppress(Exception):
            await self._closing()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _MOST_CONNECTIONS:
                async with asyncio.timeout(_READ_S):
                    request = await reader.readuntil(b"\r\n\r\n")
                async with asyncio.timeout(_ANSWER_S):
                    writer.write(await self._answer(request))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client's concern
        except Exception as error:
            log.error("metrics_failed", error=error)
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, request: bytes) -> bytes:
        words = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3:
            return _written(Answer(400, b"bad request\n"))
        method, path = words[0], words[1].partition("?")[0]
        route = self._routes.get(path)
        if route is None:
            return _written(Answer(404, f"there are {', '.join(self._routes)}\n".encode()))
        if method not in ("GET", "HEAD"):
            return _written(Answer(405, b"GET only\n"))
        return _written(await route(), body=method == "GET")


def _written(answer: Answer, body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (answer.body if body else b"")


def _family(host: str) -> socket.AddressFamily:
    with suppress(ValueError):
        return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    return socket.AF_INET
