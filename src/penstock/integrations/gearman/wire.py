"""Gearman for an event loop: it receives jobs from gearmand and submits jobs to it, through the library gear.

gear uses threads and callbacks of its own; this module connects them with the event loop. It reconnects by itself. When a
connection is lost, a submitted job fails with `GearmanUnavailable` and can be submitted again with the same unique key; an answer
to a received job is dropped, since gearmand gives that job to another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import gear
import orjson

from penstock.core.logs import get_logger
from penstock.core.serialization import dump_json
from penstock.errors import InvalidInput, PenstockError

log = get_logger("penstock.gearman")
DEFAULT_PORT = 4730
_CONNECT_S = 10.0


class GearmanUnavailable(PenstockError):
    """No gearmand is connected, or the connection was lost; the job may or may not have been run."""


class GearmanFailure(PenstockError):
    """A Gearman worker failed a job."""


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a gearmand."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Server:
        """From HOST, HOST:PORT or [IPV6]:PORT. Raises `InvalidInput`."""
        host, colon, port = text.rpartition(":")
        if not colon or (text.startswith("[") and text.endswith("]")):
            host, port = text, str(DEFAULT_PORT)
        if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidInput(f"{text!r} is not a Gearman server", hint="Give HOST:PORT, such as 127.0.0.1:4730.")
        return cls(host.strip("[]"), int(port))


class TakenJob:
    """A job that the bridge received from gearmand."""

    def __init__(self, job: Any, answered: Callable[[], None], executor: ThreadPoolExecutor) -> None:
        self.function: str = job.name
        self.arguments: bytes = job.arguments
        self.unique: str = (job.unique or b"").decode("utf-8", "replace")
        self.handle: str = job.handle.decode("utf-8", "replace")
        self._job = job
        self._connected_at = job.connection.connect_time
        self._answered = answered
        self._executor = executor

    async def complete(self, result: bytes) -> None:
        """Report that the job succeeded, with its result."""
        await self._answer(lambda: self._job.sendWorkComplete(result))

    async def refuse(self, reason: str) -> None:
        """Report that the job failed, with the reason."""
        await self._answer(lambda: self._job.sendWorkException(reason.encode()))

    async def _answer(self, send: Callable[[], None]) -> None:
        self._answered()
        # gearmand does not know the job on a new connection.
        if self._job.connection.connect_time != self._connected_at:
            log.warning("gearman_answer_dropped", function=self.function, handle=self.handle)
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, send)
        except OSError as error:
            log.warning("gearman_answer_lost", function=self.function, handle=self.handle, error=error)


class Wire:
    """Connections to one or more gearmands.

    Args:
        servers: Their addresses. Functions are registered with all of them; jobs are submitted to one after the other.
        client_id: Name under which gearmand lists the bridge.
        functions: Gearman functions whose jobs to receive.
        taken: Called on the loop with each received job.
        most: The largest number of received jobs that are not answered.
    """

    def __init__(
        self, servers: Sequence[Server], client_id: str, functions: Sequence[str], taken: Callable[[TakenJob], None], most: int
    ) -> None:
        # gear logs lost connections as errors with tracebacks; this module logs each in one line.
        logging.getLogger("gear").setLevel(logging.CRITICAL)
        self._loop = asyncio.get_running_loop()
        self._taken = taken
        self._room = threading.Semaphore(most)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="penstock-gearman-answer")
        # gearmand answers the submissions of a connection in their order, without naming them, and gear records and sends a
        # submission in two steps: two threads that submit at the same time would get the handles of each other's jobs.
        self._submitting = ThreadPoolExecutor(1, thread_name_prefix="penstock-gearman-submit")
        self._connected = asyncio.Event()
        self._client = _Client(client_id, self._connection_changed)
        self._client.setOption(b"exceptions")
        self._worker = _Worker(client_id)
        for server in servers:
            self._client.addServer(server.host, server.port)
            self._worker.addServer(server.host, server.port)
        for function in functions:
            self._worker.registerFunction(function)
        threading.Thread(target=self._take, name="penstock-gearman-take", daemon=True).start()

    async def submit(self, function: str, arguments: bytes, unique: str) -> bytes:
        """Give a job to gearmand and wait for its result.

        Cancelling does not take it back: given again with the same unique key, it is the same job to gearmand.

        Raises:
            GearmanFailure: Its worker failed.
            GearmanUnavailable: No gearmand, or it went away.
        """
        job = _Job(self._loop, function, arguments, unique.encode())
        # All wait here at the same time, so that none waits behind another for a gearmand that is away.
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._connected.wait()
        except TimeoutError:
            raise GearmanUnavailable(f"no Gearman server takes the job {function}: none is connected") from None
        await self._loop.run_in_executor(self._submitting, self._submit, job)
        return await job.result

    def stop_taking(self) -> None:
        """Take no more jobs; those that were taken can be answered still."""
        self._worker.functions.clear()
        self._worker._sendResetAbilities()

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._submitting.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=self._close, name="penstock-gearman-close", daemon=True).start()

    def _close(self) -> None:
        self._worker.shutdown()
        self._client.shutdown()

    def _take(self) -> None:
        while True:
            self._room.acquire()
            try:
                job = self._worker.getJob()
            except gear.InterruptedError:
                return
            try:
                self._loop.call_soon_threadsafe(self._taken, TakenJob(job, self._room.release, self._threads))
            except RuntimeError:  # the loop is closed
                return

    def _connection_changed(self) -> None:
        """From gear's threads: a connection came or went."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note_connections)

    def _note_connections(self) -> None:
        if self._client.active_connections:
            self._connected.set()
        else:
            self._connected.clear()

    def _submit(self, job: _Job) -> None:
        try:
            self._client.submitJob(job, timeout=_CONNECT_S)
        except (gear.GearmanError, gear.NoConnectedServersError, gear.TimeoutError, OSError) as error:
            raise GearmanUnavailable(f"no Gearman server takes the job {job.name}: {error or type(error).__name__}") from None


class _Job(gear.Job):  # type: ignore[misc]
    """A job that is given to gearmand, with a future for what becomes of it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, arguments: bytes, unique: bytes) -> None:
        super().__init__(name, arguments, unique)
        self.result: asyncio.Future[bytes] = loop.create_future()
        # Given again under the same unique key on the same connection it has the same handle: all get the result.
        self.earlier: _Job | None = None
        self._loop = loop

    def finish(self, error: PenstockError | None = None) -> None:
        """Hand the result to the loop; from any thread."""
        job: _Job | None = self
        while job is not None:
            try:
                self._loop.call_soon_threadsafe(job._set, b"".join(self.data), error)
            except RuntimeError:  # the loop is closed
                return
            job = job.earlier

    def _set(self, data: bytes, error: PenstockError | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(data)
        else:
            self.result.set_exception(error)
            self.result.exception()  # marks it as retrieved: the caller may have stopped waiting


class _Client(gear.Client):  # type: ignore[misc]
    """gear's client, which tells a job's future what happened.

    Args:
        client_id: The name under which gearmand lists it.
        changed: Called from gear's threads when a connection came or went.
    """

    def __init__(self, client_id: str, changed: Callable[[], None]) -> None:
        self._changed = changed
        super().__init__(client_id)

    def _onConnect(self, conn: Any) -> None:  # noqa: N802
        _send_at_once(conn)
        super()._onConnect(conn)

    def _onActiveConnection(self, conn: Any) -> None:  # noqa: N802
        super()._onActiveConnection(conn)
        self._changed()

    def handleJobCreated(self, packet: Any) -> Any:  # noqa: N802
        """The job has a handle now."""
        earlier = packet.connection.related_jobs.get(packet.data)
        job = super().handleJobCreated(packet)
        if earlier is not None and earlier is not job:
            job.earlier = earlier
        return job

    def handleWorkComplete(self, packet: Any) -> Any:  # noqa: N802
        """A worker is done."""
        return self._ended(super().handleWorkComplete, packet, lambda job: None)

    def handleWorkFail(self, packet: Any) -> Any:  # noqa: N802
        """A worker failed."""
        return self._ended(super().handleWorkFail, packet, lambda job: GearmanFailure("Worker failure"))

    def handleWorkException(self, packet: Any) -> Any:  # noqa: N802
        """A worker failed and says why."""
        return self._ended(
            super().handleWorkException,
            packet,
            lambda job: GearmanFailure((job.exception or b"").decode("utf-8", "replace") or "Worker failure"),
        )

    def handleDisconnect(self, job: Any) -> Any:  # noqa: N802
        """The connection was lost while the job was under way."""
        job.finish(GearmanUnavailable("the connection to the Gearman server was lost"))
        return super().handleDisconnect(job)

    def _ended(self, handle: Callable[[Any], Any], packet: Any, error: Callable[[Any], PenstockError | None]) -> Any:
        try:
            job = handle(packet)
        except (gear.UnknownJobError, KeyError):
            # gearmand notifies each submitter of the job; this process has been notified already.
            return None
        job.finish(error(job))
        return job

    def _lostConnection(self, conn: Any) -> None:  # noqa: N802
        log.warning("gearman_lost", server=f"{conn.host}:{conn.port}")
        super()._lostConnection(conn)
        self._changed()


class _Worker(gear.Worker):  # type: ignore[misc]
    """gear's worker, which says when it is connected."""

    def _onConnect(self, conn: Any) -> None:  # noqa: N802
        _send_at_once(conn)
        super()._onConnect(conn)
        log.info("gearman_connected", server=f"{conn.host}:{conn.port}")


def _send_at_once(conn: Any) -> None:
    """Without Nagle's algorithm, which holds the second of two small packets back for 40 ms."""
    conn.conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def as_bytes(data: Any) -> bytes:
    """A payload as Gearman carries it: text as it is, everything else as JSON."""
    return data.encode() if isinstance(data, str) else dump_json(data, "a Gearman job").encode()


def parsed(result: bytes) -> Any:
    """A result of a Gearman worker: JSON as what it says, everything else as text."""
    text = result.decode("utf-8", "replace").replace("\x00", "\ufffd")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text or None
