"""A declared job type: its handler and options, and enqueueing through it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

from penstock.core.serialization import Codec
from penstock.errors import InvalidInput
from penstock.jobs import queries as jobs
from penstock.jobs.enqueue import enqueue_many
from penstock.jobs.handler import Handler, HandlerKind, Job
from penstock.jobs.models import Enqueued, NewJob, Options
from penstock.jobs.sync import SyncJobType
from penstock.postgres.context import Context
from penstock.postgres.database import Database, unless_refused

T = TypeVar("T")


class Declarer(Protocol):
    """The pool, or the subscription of a topic, to which a job type belongs."""

    @property
    def works(self) -> bool:
        """Whether it gives a worker something to run besides the handler of the type."""

    async def declare_type(self, database: Database, options: Options) -> None:
        """Write the job type into the database, with the pool or subscription that it belongs to."""


class JobType(Generic[T]):
    """A declared job type: it enqueues jobs, and is callable like the function that it was made from.

    `Penstock.job` and `Penstock.job_type` make it.
    """

    def __init__(
        self, context: Context, name: str, payload: Any, options: Options, handler: Handler | None, kind: HandlerKind
    ) -> None:
        self.context = context
        self.name = name
        self.options = options
        self.handler = handler
        self.kind: HandlerKind = kind
        self.codec: Codec[T] = Codec(payload, name)
        self.declarer: Declarer | None = None

    @property
    def sync(self) -> SyncJobType[T]:
        """The blocking half, for threads without an event loop."""
        return SyncJobType(self, self.context.background)

    @property
    def works(self) -> bool:
        """Whether this application has something for a worker to run."""
        return self.handler is not None or (self.declarer is not None and self.declarer.works)

    def __call__(self, job: Job[T]) -> Any:
        """Run the handler itself, as a plain function."""
        if self.handler is None:
            raise InvalidInput(f"job type {self.name} has no handler in this application")
        return self.handler(job)

    async def declare(self) -> None:
        """Write the job type with its options into the database, with its pool or its subscription where it has one.

        This happens once for each database; an enqueue without `connection=` does it implicitly.

        Raises:
            InvalidInput: An option is not valid.
            Conflict: The name is in use for something else.
        """
        database = await self.context.database()
        if ("job", self.name) in database.declared:
            return
        if self.declarer is not None:
            await self.declarer.declare_type(database, self.options)
        else:
            await jobs.declare_job_type(database, self.name, self.options.as_json())
        database.declared["job", self.name] = True

    async def _ready(self) -> None:
        """Write the declaration when the type was declared after the application was opened.

        A role that only enqueues may not write it, and relies on the workers or an administrator to have done so.
        """
        if not await unless_refused(self.declare()):
            (await self.context.database()).declared["job", self.name] = False

    async def enqueue(
        self,
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
        return (await self.enqueue_many([new], connection=connection))[0]

    async def enqueue_many(self, new: Iterable[NewJob | T], *, connection: Any = None) -> list[Enqueued]:
        """Enqueue many jobs. See `Penstock.enqueue_many`."""
        if connection is None or self.context.is_open:
            await self._ready()
        return await enqueue_many(self.context, self.name, self.codec, new, connection)
