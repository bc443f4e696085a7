"""Penstock for threads without an event loop: Django, Flask, scripts.

Calls run on a loop in a background thread, one for each app. With `connection=` nothing leaves the calling thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from penstock.app import JobType, Penstock
from penstock.batches import make_batch, receipts_of
from penstock.callers import enqueue_through_blocking, publish_through_blocking
from penstock.errors import DatabaseUnavailable, InvalidInput
from penstock.job import Enqueued, JobCounts, JobRecord, NewJob, Options, Status
from penstock.message import Message, Published, Subscribed
from penstock.topics import Topic

T = TypeVar("T")


class SyncPenstock:
    """The blocking side of an app; get it from `Penstock.sync`. Safe to use from many threads.

    Args:
        app: The app.
        timeout: Longest time for one call.
    """

    def __init__(self, app: Penstock, *, timeout: timedelta = timedelta(seconds=60)) -> None:
        self._app = app
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._process = os.getpid()

    def enqueue(
        self,
        type: JobType[T] | str,
        data: T | None = None,
        *,
        id: UUID | str | None = None,
        key: str | None = None,
        priority: int = 0,
        run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None,
        unique: str | None = None,
        connection: Any = None,
    ) -> Enqueued:
        """Enqueue one job. See `Penstock.enqueue`."""
        new = NewJob({} if data is None else data, id, key, priority, run_after, expires_at, unique)
        return self.enqueue_many(type, [new], connection=connection)[0]

    def enqueue_many(self, type: JobType[T] | str, new: Iterable[NewJob | T], *, connection: Any = None) -> list[Enqueued]:
        """Enqueue many jobs. See `Penstock.enqueue_many`."""
        if connection is None:
            return self._call(self._app.enqueue_many(type, new))
        declared = self._app.types.get(type) if isinstance(type, str) else type
        if declared is None:
            declared = JobType(self._app, str(type), Any, Options(), None, "async")
        batch = make_batch(declared.name, declared.codec, list(new))
        return receipts_of(batch, enqueue_through_blocking(connection, batch))

    def publish(
        self,
        topic: Topic[T] | str,
        data: T | None = None,
        *,
        id: UUID | str | None = None,
        unique: str | None = None,
        run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None,
        background: bool = True,
        timeout: timedelta = timedelta(seconds=30),
        connection: Any = None,
    ) -> Published:
        """Publish a message. See `penstock.topics.Topic.publish`."""
        declared = self._topic(topic)
        if connection is not None and background:
            document = declared.document(data, id, unique, run_after, expires_at)
            return publish_through_blocking(connection, declared.name, document)
        if connection is not None:
            raise InvalidInput("nobody can receive a message before the caller's transaction commits")
        publishing = declared.publish(
            data, id=id, unique=unique, run_after=run_after, expires_at=expires_at, background=background, timeout=timeout
        )
        return self._call(publishing, timeout + self._timeout)

    def subscribe(
        self,
        topic: Topic[Any] | str,
        client_id: str,
        *,
        filter: Any = None,
        ttl: timedelta | None = None,
        since: int | None = None,
    ) -> Subscribed:
        """Subscribe a client to a topic. See `penstock.topics.Topic.subscribe`."""
        return self._call(self._topic(topic).subscribe(client_id, filter=filter, ttl=ttl, since=since))

    def unsubscribe(self, topic: Topic[Any] | str, client_id: str, *, drop: bool = False) -> bool:
        """End a subscription. See `penstock.topics.Topic.unsubscribe`."""
        return self._call(self._topic(topic).unsubscribe(client_id, drop=drop))

    def read(self, topic: Topic[T] | str, since: int | None = None, *, limit: int = 100) -> list[Message[T]]:
        """Messages of a topic after a sequence number. See `penstock.topics.Topic.read`."""
        return self._call(self._topic(topic).read(since, limit=limit))

    def find(self, id: UUID | str) -> JobRecord:
        """Everything known of a job. See `Penstock.find`."""
        return self._call(self._app.find(id))

    def find_many(
        self, *, name: str | None = None, status: Status | str | None = None, key: str | None = None, limit: int = 50
    ) -> list[JobRecord]:
        """Jobs, latest first. See `Penstock.find_many`."""
        return self._call(self._app.find_many(name=name, status=status, key=key, limit=limit))

    def wait(self, id: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> JobRecord:
        """Wait until a job is finished. See `Penstock.wait`."""
        return self._call(self._app.wait(id, timeout=timeout), timeout + self._timeout)

    def cancel(self, id: UUID | str) -> str:
        """Cancel a job. See `Penstock.cancel`."""
        return self._call(self._app.cancel(id))

    def replay(self, id: UUID | str) -> Enqueued:
        """Enqueue a copy of a job. See `Penstock.replay`."""
        return self._call(self._app.replay(id))

    def pause(self, name: str) -> None:
        """Pause a job type. See `Penstock.pause`."""
        self._call(self._app.pause(name))

    def resume(self, name: str) -> None:
        """Resume a job type. See `Penstock.resume`."""
        self._call(self._app.resume(name))

    def counts(self) -> list[JobCounts]:
        """How each job type is doing. See `Penstock.counts`."""
        return self._call(self._app.counts())

    def close(self) -> None:
        """Close the app and end the background thread."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._app.close(), loop).result(self._timeout.total_seconds())
            loop.call_soon_threadsafe(loop.stop)

    def _topic(self, topic: Topic[Any] | str) -> Topic[Any]:
        return self._app.topic(topic) if isinstance(topic, str) else topic

    def _call(self, call: Coroutine[Any, Any, T], timeout: timedelta | None = None) -> T:
        if self._process != os.getpid():
            # A fork copies no threads, and maybe a lock that one of them held.
            self._starting, self._loop, self._process = threading.Lock(), None, os.getpid()
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="penstock-sync", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result((timeout or self._timeout).total_seconds())
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise DatabaseUnavailable(
                "the call did not end in time", hint="It may or may not have taken effect; retry it with the same id."
            ) from None
