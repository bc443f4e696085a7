"""What the commands work through: the database, by `Penstock`, or a server, by `AsyncClient`. Both have these methods.

A command that needs the database itself takes it from `database_app`, which raises an error when a server is configured.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, Protocol, Self, TypeVar
from uuid import UUID

from penstock.app import Penstock
from penstock.errors import InvalidInput
from penstock.jobs.models import Enqueued, JobCounts, JobRecord, JobTypeRecord, NewJob, Status, Why
from penstock.jobs.scaling import ScaleAdvice
from penstock.pools.models import KeyedJob, KeyState, PausedKey, PoolDetails, PoolMember, QuarantinedKey, StandingState
from penstock.schedules.schedule import ScheduleRecord, ScheduleRun
from penstock.streams.group_models import Lag
from penstock.streams.models import Event, NewEvent, Position, Start, StreamSummary
from penstock.topics.models import Message, NewMessage, Published, Subscribed, Subscriber, TopicCounts

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Closable(AsyncIterable[T_co], Protocol[T_co]):
    """Items to iterate over, and to close."""

    def aclose(self) -> Awaitable[None]:
        """Stop iterating."""


class BackendPool(Protocol):
    """A pool. See `Pool`."""

    async def details(self) -> PoolDetails: ...
    async def resize(self, slots: int) -> None: ...
    async def workers(self) -> list[PoolMember]: ...
    async def drain(self, worker: str) -> PoolMember: ...
    async def undrain(self, worker: str) -> PoolMember: ...
    async def state(self, key: str) -> KeyState: ...
    async def pause_key(self, key: str) -> datetime: ...
    async def resume_key(self, key: str) -> bool: ...
    async def paused_keys(self, *, after: str | None = None, limit: int = 100) -> list[PausedKey]: ...
    async def quarantined_keys(self, *, after: str | None = None, limit: int = 100) -> list[QuarantinedKey]: ...
    async def release_key(self, key: str) -> object: ...
    async def set_weight(self, key: str, weight: int) -> None: ...
    async def weights(self) -> dict[str, int]: ...
    async def standing_jobs(self) -> list[StandingState]: ...
    async def start(self, key: str, data: Any = None, *, replace: bool = False) -> str: ...
    async def stop(self, key: str) -> bool: ...
    async def notify(self, key: str, message: Any) -> None: ...
    async def list(self, *, key: str | None = None, after: str | None = None, limit: int = 100) -> list[KeyedJob]: ...


class BackendStream(Protocol):
    """A stream. See `Stream`."""

    async def change(self, **options: Any) -> object: ...
    async def grow(self, partitions: int) -> object: ...
    async def drop(self, *, force: bool = False) -> None: ...
    async def append(self, data: Any, *, key: str | None = None) -> Position | None: ...
    async def append_many(self, items: Iterable[NewEvent[Any] | Any], /) -> object: ...
    def tail(self, start: Start = "latest", *, partitions: Iterable[int] | None = None) -> Closable[Event[Any]]: ...
    async def lag(self, group: str | None = None) -> list[Lag]: ...
    async def places(self, start: Start) -> dict[int, int]: ...
    async def seek(self, group: str, to: Start) -> object: ...
    async def pause(self, group: str, partitions: list[int] | None = None, *, reason: str | None = None) -> int: ...
    async def resume(self, group: str, partitions: list[int] | None = None) -> int: ...


class BackendTopic(Protocol):
    """A topic. See `Topic`."""

    async def declare(self) -> None: ...
    async def publish(
        self, data: Any = None, *, id: UUID | str | None = None, unique: str | None = None,
        run_after: datetime | timedelta | None = None, expires_at: datetime | timedelta | None = None, background: bool = True,
        timeout: timedelta = timedelta(seconds=30),
    ) -> Published: ...  # fmt: skip
    async def publish_many(self, messages: Iterable[NewMessage[Any] | Any]) -> object: ...
    async def subscribe(
        self, client_id: str, *, filter: Any = None, ttl: timedelta | None = None, since: int | None = None
    ) -> Subscribed: ...
    async def unsubscribe(self, client_id: str, *, drop: bool = False) -> bool: ...
    async def subscribers(self) -> list[Subscriber]: ...
    async def read(self, since: int | None = None, *, limit: int = 100) -> list[Message[Any]]: ...


class Backend(Protocol):
    """Everything. See `Penstock`."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, kind: Any, error: Any, traceback: Any, /) -> None: ...

    async def enqueue_many(self, name: str, new: Iterable[NewJob | Any], /) -> list[Enqueued]: ...
    async def find(self, id: UUID | str) -> JobRecord: ...
    async def why(self, id: UUID | str) -> Why: ...
    async def find_many(
        self, *, name: str | None = None, status: Status | str | None = None, key: str | None = None, reason: str | None = None,
        limit: int = 50,
    ) -> list[JobRecord]: ...  # fmt: skip
    async def cancel(self, id: UUID | str) -> str: ...
    async def replay(
        self, id: UUID | str, *, new_id: UUID | str | None = None, data: Any = None, force: bool = False
    ) -> Enqueued: ...

    async def job_types(self) -> list[JobTypeRecord]: ...
    async def create_job_type(self, name: str, **options: Any) -> JobTypeRecord: ...
    async def change_job_type(self, name: str, **options: Any) -> JobTypeRecord: ...
    async def pause(self, name: str) -> None: ...
    async def resume(self, name: str) -> None: ...
    async def counts(self) -> list[JobCounts]: ...
    async def scale_advice(self, *, wait_s: float = 5.0) -> list[ScaleAdvice]: ...

    async def list_schedules(self) -> list[ScheduleRecord]: ...
    async def schedule_runs(self, name: str, *, status: Status | str | None = None, limit: int = 20) -> list[ScheduleRun]: ...
    async def run_schedule(self, name: str) -> UUID | None: ...
    async def drop_schedule(self, name: str) -> None: ...

    async def list_pools(self) -> list[PoolDetails]: ...
    async def create_pool(self, name: str, *, convert: bool = False, **options: Any) -> PoolDetails: ...
    async def find_pool(self, name: str) -> BackendPool: ...

    async def list_streams(self) -> list[StreamSummary]: ...
    async def create_stream(self, name: str, partitions: int = 16, **options: Any) -> object: ...
    async def find_stream(self, name: str) -> BackendStream: ...

    async def topic_counts(self) -> list[TopicCounts]: ...
    def topic(self, name: str, *, keep: int | None = None) -> BackendTopic: ...
    async def find_topic(self, name: str) -> BackendTopic: ...


def with_backend(work: Callable[[Backend], Awaitable[T]]) -> T:
    """Run `work` through the configured server, or else through the database, and close it."""

    async def run() -> T:
        async with _backend() as backend:
            return await work(backend)

    return asyncio.run(run())


def with_pool(name: str, work: Callable[[BackendPool], Awaitable[T]]) -> T:
    """Run `work` with a pool. Raises `NotFound`."""

    async def run(backend: Backend) -> T:
        return await work(await backend.find_pool(name))

    return with_backend(run)


def with_stream(name: str, work: Callable[[BackendStream], Awaitable[T]]) -> T:
    """Run `work` with a stream. Raises `NotFound`."""

    async def run(backend: Backend) -> T:
        return await work(await backend.find_stream(name))

    return with_backend(run)


def with_topic(name: str, work: Callable[[BackendTopic], Awaitable[T]]) -> T:
    """Run `work` with a topic, which is there: a misspelled name must not make another one. Raises `NotFound`."""

    async def run(backend: Backend) -> T:
        return await work(await backend.find_topic(name))

    return with_backend(run)


def with_database(work: Callable[[Penstock], Awaitable[T]], app: Penstock | None = None) -> T:
    """Run `work` on an open app, and close it. Raises `InvalidInput` when a server is configured instead of a database."""
    opened = app or database_app()

    async def run() -> T:
        async with opened:
            return await work(opened)

    return asyncio.run(run())


def database_app() -> Penstock:
    """The app of a command that needs the database itself. Raises `InvalidInput` when a server is configured instead."""
    require_database()
    return Penstock()


def require_database() -> None:
    """Raise `InvalidInput` when a server is configured."""
    if _server():
        raise InvalidInput("this needs the database itself", hint="Leave --server out and unset PENSTOCK_SERVER_URL.")


def _backend() -> Backend:
    url = _server()
    if url is None:
        return Penstock()
    from penstock.client import AsyncClient

    return AsyncClient(url, token=os.environ.get("PENSTOCK_SERVER_TOKEN") or None)


def _server() -> str | None:
    return os.environ.get("PENSTOCK_SERVER_URL") or None
