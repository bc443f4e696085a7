"""A declared job type: its handler and options, and enqueueing through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, ParamSpec, Protocol, Self, Unpack
from uuid import UUID

from penstock.core.dependencies import Overrides, Plan, name_of, overrides_in
from penstock.core.encryption import SealedCodec, Sealer
from penstock.core.keys import KeyOf, check_key, key_by, key_of_field
from penstock.core.serialization import Codec
from penstock.errors import InvalidInput
from penstock.jobs import type_queries
from penstock.jobs.child import ChildJob
from penstock.jobs.enqueue import enqueue_many
from penstock.jobs.handler import Handler, HandlerKind, Job, Jobs, kind_of
from penstock.jobs.models import Enqueued, Executor, NewJob, NewJobOptions, new_job, the_only
from penstock.jobs.options import Options
from penstock.jobs.signature import Signature, signature_of_handler
from penstock.jobs.sync import SyncJobCall, SyncJobType
from penstock.jobs.worked import BatchOptions, WorkedType
from penstock.postgres.context import Context
from penstock.postgres.database import Database
from penstock.postgres.translation import unless_refused
from penstock.settings import Keep

P = ParamSpec("P")


class Declarer(Protocol):
    """The pool, or the subscription of a topic, to which a job type belongs."""

    @property
    def works(self) -> bool:
        """Whether it gives a worker something to run besides the handler of the type."""

    async def declare_type(self, database: Database, options: Options, *, again: bool) -> None:
        """Write the job type into the database, with the pool or subscription that it belongs to. See `JobType.ensure`."""


class JobType(Generic[P]):
    """A declared job type: it enqueues jobs, and is callable like the function that it was made from.

    `Penstock.job`, `Pool.job`, `Topic.subscriber` and `Penstock.job_type` make it. P are the arguments of an enqueue: those of
    the handler without its dependencies, or one payload where the handler takes a `Job`.

    Args:
        context: Open databases, settings and hooks of the application.
        name: Name of the type.
        payload: Type of its payloads; a handler's signature takes precedence.
        options: How its jobs are delivered, retried and limited.
        key: Name of a field of the payload, or a function of it, that gives a job its key.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        payload: Any = Any,
        options: Options = Options(),
        key: str | Callable[[Any], str | None] | None = None,
    ) -> None:
        self.context = context
        self.name = name
        default = context.settings.keep
        self.declared = replace(options, keep=default) if options.keep is None and isinstance(default, Keep) else options
        self.declarer: Declarer | None = None
        self.function: Callable[..., Any] | None = None
        self.handler: Handler | None = None
        self.kind: HandlerKind = "async"
        self.batch: BatchOptions | None = None
        # What the payloads of its jobs belong to, when they are encrypted: the type, or the topic of a subscriber.
        self.owner = ("job", name)
        self._key = key
        self._takes(Signature(payload))

    def _takes(self, signature: Signature) -> None:
        self.signature = signature
        plain: Codec[Any] = Codec(signature.payload, self.name)
        self.codec = SealedCodec(plain, self.context.keyring, *self.owner) if self.declared.encrypted else plain
        check_key(f"job type {self.name}", signature.payload, self._key)
        self.key_of: KeyOf | None = None
        what = f"a job of type {self.name}"
        if isinstance(self._key, str):
            hint = "Give the payload this field, or the job a key: .options(key=...)."
            self.key_of = key_of_field(what, self._key, False, self.codec.check, hint)
        elif self._key is not None:
            self.key_of = key_by(what, self._key)

    def handled_by(self, function: Callable[..., Any], executor: Executor = "auto", batch: BatchOptions | None = None) -> None:
        """Set the handler.

        Args:
            function: The handler, as it is declared.
            executor: See `Penstock.job`.
            batch: How it gets batches; None: it takes one job.

        Raises:
            InvalidInput: The handler cannot be used, or the type has one already.
        """
        if self.function is not None:
            raise InvalidInput(f"{self.name} has a handler already", hint="Give each job type and pool one handler.")
        kind = kind_of(function, executor)
        signature, handler = signature_of_handler(function, blocking=kind == "process")
        declared = self.signature.payload
        if signature.form == "job" and signature.payload is Any and declared is not Any:
            signature = replace(signature, payload=declared)
        if (batch is not None) != (signature.form == "batch") or (batch is not None and kind == "process"):
            raise InvalidInput(
                f"{name_of(function)} cannot be the handler of {self.name}: "
                + ("batches are not sent to processes" if kind == "process" else "lists of jobs and max_batch_size go together"),
                hint="A batch handler is declared with max_batch_size=..., and takes jobs: list[Job[Payload]].",
            )
        self.batch = batch
        self.handled_as(function, signature, handler, kind)

    def handled_as(self, function: Callable[..., Any], signature: Signature, handler: Handler, kind: HandlerKind) -> None:
        """Set the handler, whose signature has been read already.

        Args:
            function: Function that the application declared.
            signature: What its parameters are.
            handler: Function of a `Job` that calls it.
            kind: Where it runs: on the loop, in a thread or in a process.
        """
        self._takes(signature)
        self.function, self.handler, self.kind = function, handler, kind

    @property
    def sync(self) -> SyncJobType[P]:
        """The blocking half, for threads without an event loop."""
        return SyncJobType(self, self.context.background)

    @property
    def works(self) -> bool:
        """Whether this application has something for a worker to run."""
        return self.handler is not None or (self.declarer is not None and self.declarer.works)

    def sealer(self) -> Sealer:
        """Encrypts what a worker writes of the jobs."""
        return Sealer(self.context.keyring, self.name, self.owner, encrypted=self.declared.encrypted)

    def worked(self, sealer: Sealer | None = None) -> WorkedType | None:
        """The type as a part of a worker; None: it has no handler.

        Args:
            sealer: Encrypts results and errors; None: the type is not encrypted.
        """
        if self.handler is None:
            return None
        # In a process, the dependencies are made there.
        plan = Plan({}) if self.kind == "process" else self.signature.plan
        around = self.context.hooks.around(plan, Job if self.batch is None else Jobs)
        return WorkedType(
            self.name, self.declared, self.codec, self.handler, self.kind, around, self.batch,
            sealer=sealer or self.sealer(), overrides=self._overrides,
        )  # fmt: skip

    def _overrides(self) -> Overrides:
        return overrides_in(self.signature.plan, self.context.hooks.dependency_overrides, (Job,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the handler itself, as a plain function, with all of its arguments."""
        if self.function is None:
            raise InvalidInput(f"job type {self.name} has no handler in this application")
        return self.function(*args, **kwargs)

    async def declare(self) -> None:
        """Write the job type with its options into the database, with its pool or its subscription where it has one.

        It creates a type again that was dropped, which an enqueue does not do.

        Raises:
            InvalidInput: An option is not valid.
            Conflict: The name is in use for something else.
        """
        await self._declare(await self.context.database(), again=True)

    async def ensure(self, *, again: bool) -> None:
        """`declare`, once for each database.

        Args:
            again: Whether to create the type again when it was dropped.

        Raises:
            NotFound: The type was dropped, and is not to be created again.
        """
        database = await self.context.database()
        if ("job", self.name) not in database.declared:
            await self._declare(database, again=again)

    async def _declare(self, database: Database, *, again: bool) -> None:
        if self.declarer is not None:
            await self.declarer.declare_type(database, self.declared, again=again)
        else:
            await type_queries.declare_job_type(database, self.name, self.declared.as_json(), again=again)
        database.declared["job", self.name] = True

    async def declare_if_allowed(self) -> None:
        """Write the declaration when the type was declared after the application was opened, unless it was dropped.

        A role that only enqueues may not write it, and relies on the workers or an administrator to have done so.
        """
        if not await unless_refused(self.ensure(again=False)):
            (await self.context.database()).declared["job", self.name] = False

    def options(
        self,
        *,
        connection: Any = None,
        **options: Unpack[NewJobOptions],
    ) -> JobCall[P]:
        """Options of one job, which come before its arguments: `await resize.options(key="u1").enqueue(path="a.png")`.

        Args:
            connection: Connection of the caller, in whose transaction to enqueue; see `Penstock.enqueue`.
            options: Fields of `NewJob`: `id`, `key` (instead of the declared one), `priority`, `run_after`, ...
        """
        return JobCall(self, new_job(self.name, None, options), connection)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """Enqueue one job with these arguments. See `Penstock.enqueue`, and `options` for its options.

        Args:
            args: Arguments of the handler by position: its payload, or the fields of its payload.
            kwargs: Arguments of the handler by name.
        """
        return the_only(await self.enqueue_many([self.new(*args, **kwargs)]))

    def new(self, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """A job with these arguments, for `enqueue_many`.

        Args:
            args: Arguments by position, as for `enqueue`.
            kwargs: Arguments by name, as for `enqueue`.
        """
        return NewJob(self.codec.or_empty(self.signature.payload_of(self.name, args, kwargs)))

    def child(self, *args: P.args, **kwargs: P.kwargs) -> ChildJob:
        """A job with these arguments, for `Job.gather`.

        Args:
            args: Arguments by position, as for `enqueue`.
            kwargs: Arguments by name, as for `enqueue`.
        """
        return ChildJob(self, self.new(*args, **kwargs))

    async def enqueue_many(self, new: Iterable[NewJob | Any], *, connection: Any = None) -> list[Enqueued]:
        """Enqueue many jobs: `NewJob`s, as `new` makes them, or payloads. See `Penstock.enqueue_many`."""
        if connection is None or self.context.is_open:
            await self.declare_if_allowed()
        return await enqueue_many(self.context, self.name, self.codec, new, connection, self.key_of)


class JobCall(Generic[P]):
    """Options of one job, to which `enqueue` gives the arguments. `JobType.options` makes it."""

    def __init__(self, type: JobType[P], new: NewJob, connection: Any) -> None:
        self.type = type
        self._new = new
        self.connection = connection

    @property
    def sync(self) -> SyncJobCall[P]:
        """The blocking half, for threads without an event loop."""
        return SyncJobCall(self, self.type.context.background)

    def with_id(self, id: UUID) -> Self:
        """These options with an id."""
        return type(self)(self.type, replace(self._new, id=id), self.connection)

    def through(self, connection: Any) -> Self:
        """These options with a connection of the caller."""
        return type(self)(self.type, self._new, connection)

    @property
    def given(self) -> NewJob:
        """The options, as a job without a payload."""
        return self._new

    async def enqueue_many(self, payloads: Iterable[Any]) -> list[Enqueued]:
        """Enqueue many jobs with these options: a job for each payload. See `Penstock.enqueue_many`.

        Args:
            payloads: Their payloads.
        """
        if self._new.id is not None:
            raise InvalidInput("an id is given for many jobs", hint="Give each job its id: enqueue_many([NewJob(data, id=...)]).")
        new = [replace(self._new, data=data) for data in payloads]
        return await self.type.enqueue_many(new, connection=self.connection)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """Enqueue one job with these arguments. See `Penstock.enqueue`."""
        return the_only(await self.type.enqueue_many([self.new(*args, **kwargs)], connection=self.connection))

    def new(self, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """A job with these options and arguments, for `enqueue_many`."""
        return replace(self._new, data=self.type.codec.or_empty(self.type.signature.payload_of(self.type.name, args, kwargs)))

    def child(self, *args: P.args, **kwargs: P.kwargs) -> ChildJob:
        """A job with these options and arguments, for `Job.gather`."""
        return ChildJob(self.type, self.new(*args, **kwargs))
