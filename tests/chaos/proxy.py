"""A TCP proxy in front of PostgreSQL that can be cut: then no data passes, and the connections stay open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import parse_qs, quote, urlsplit


class Proxy:
    """Forwards to the server at `url`; its own address is `url` after the start."""

    def __init__(self, url: str) -> None:
        self._to = url
        self._requests, self._answers = asyncio.Event(), asyncio.Event()
        self._requests.set()
        self._answers.set()
        self._cutting: asyncio.TimerHandle | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.refuses = False  # whether new connections are closed at once

    async def __aenter__(self) -> Proxy:
        parts = urlsplit(self._to)
        host = parse_qs(parts.query).get("host", [""])[0]
        self._connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
        if host.startswith("/"):
            self._connect = lambda: asyncio.open_unix_connection(f"{host}/.s.PGSQL.5432")
        else:
            self._connect = lambda: asyncio.open_connection(parts.hostname, parts.port or 5432)
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        login = quote(parts.username or "postgres") + (f":{parts.password}" if parts.password else "")
        self.url = f"postgresql://{login}@127.0.0.1:{port}{parts.path}?sslmode=disable"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._close_all()

    def cut(self, answers_first_s: float = 0.0) -> None:
        """Stop all data in both directions; connections stay open.

        Args:
            answers_first_s: Seconds for which requests still reach the server after the answers have stopped.
        """
        self._answers.clear()
        if answers_first_s:
            self._cutting = asyncio.get_running_loop().call_later(answers_first_s, self._requests.clear)
        else:
            self._requests.clear()

    def mend(self) -> None:
        """Let data pass again. Connections that were open during the cut are closed."""
        self._close_all()
        if self._cutting is not None:
            self._cutting.cancel()
        self._requests.set()
        self._answers.set()

    def _close_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        self._writers.add(writer)
        other_writer = None
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._requests.wait()
            other_reader, other_writer = await self._connect()
            self._writers.add(other_writer)
            await asyncio.gather(
                self._pump(reader, other_writer, self._requests), self._pump(other_reader, writer, self._answers)
            )
        for each in filter(None, (writer, other_writer)):
            self._writers.discard(each)
            each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
        while data := await reader.read(65_536):
            await flows.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
