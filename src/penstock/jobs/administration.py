"""What people and programs do with jobs and job types by their names, declared here or not: a part of `Penstock`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, Unpack
from uuid import UUID

from penstock.core.checks import check_choice, check_flag, check_number, check_text
from penstock.core.encryption import is_envelope
from penstock.core.serialization import Codec, dump_json, load_json
from penstock.errors import InvalidInput
from penstock.jobs import opening, type_queries
from penstock.jobs import queries as jobs
from penstock.jobs.checks import check_type_name, no_such_type
from penstock.jobs.declarations import JobDeclarations
from penstock.jobs.enqueue import enqueue_many
from penstock.jobs.job_type import JobType
from penstock.jobs.models import (
    Enqueued,
    EnqueueOutcome,
    GroupReference,
    NewJob,
    NewJobOptions,
    group_id,
    make_id,
    new_job,
    the_only,
)
from penstock.jobs.records import HandlerRecord, JobCounts, JobRecord, JobTypeRecord, Status, Why, parse_id
from penstock.jobs.top import TopRecord, check_top, top

if TYPE_CHECKING:
    from penstock.postgres.database import Database

T = TypeVar("T")


class JobAdministration(JobDeclarations):
    """Enqueues, lists, cancels and replays jobs; lists, creates, changes and pauses job types."""

    async def enqueue(
        self,
        type: JobType[T] | str,
        data: T | None = None,
        *,
        connection: Any = None,
        **options: Unpack[NewJobOptions],
    ) -> Enqueued:
        """Enqueue one job.

        Args:
            type: Job type, or its name.
            data: Payload; None: an empty object, unless the type of the payload has None.
            connection: Connection through which to enqueue, in its transaction: of asyncpg, psycopg, SQLAlchemy (connection or
                session, sync or async), or Django. The job exists when that transaction commits.
            options: Fields of `NewJob`: `id`, `key`, `priority`, `run_after`, `expires_at`, `unique`, ...

        Returns:
            The receipt, with the id of the job.

        Raises:
            InvalidInput: An argument is not valid; nothing was written.
            NotFound: The job type does not exist.
            DatabaseUnavailable: It is not known whether the job was written: retry with the same id.
        """
        name = _name_of(type)
        payload: Any = ({} if data is None else data) if isinstance(type, str) else type.codec.or_empty(data)
        new = new_job(name, payload, options)
        return the_only(await self.enqueue_many(type, [new], connection=connection))

    async def enqueue_many(self, type: JobType[T] | str, new: Iterable[NewJob | T], *, connection: Any = None) -> list[Enqueued]:
        """Enqueue many jobs of one type, in atomic batches of 10,000.

        When a job cannot be enqueued, the batches before it are enqueued and the error is raised; give ids to repeat the call
        safely.

        Args:
            type: Job type, or its name.
            new: Payloads, or `NewJob`s for jobs with more than a payload.
            connection: See `enqueue`.

        Returns:
            A receipt for each, in order.
        """
        check_type_name(_name_of(type))
        declared = self.types.get(type, type) if isinstance(type, str) else type
        if isinstance(declared, str):
            return await enqueue_many(self.context, declared, Codec(Any, declared), new, connection)
        return await declared.enqueue_many(new, connection=connection)

    async def why(self, id: UUID | str) -> Why:
        """Why a job waits: the first condition that must change before it can start. Raises `NotFound`.

        Args:
            id: Id of the job.
        """
        return await jobs.why(await self.context.database(), parse_id(id))

    async def find_many(
        self,
        *,
        name: str | None = None,
        status: Status | str | None = None,
        key: str | None = None,
        reason: str | None = None,
        workflow: GroupReference | None = None,
        limit: int = 50,
    ) -> list[JobRecord]:
        """Jobs, latest first, by type, status, key, reason (`quarantined`) and workflow; at most 1,000.

        Args:
            name: Job type; None: all.
            status: Status of the jobs; None: any.
            key: Key of the jobs; None: any.
            reason: Reason for which they ended, such as `quarantined`; None: any.
            workflow: Job group whose children they are, or its id; None: any.
            limit: Largest number of jobs.

        Raises:
            NotFound: There is no such job type, and no job of it.
        """
        for what, value in (("name", name), ("key", key), ("reason", reason)):
            if value is not None:
                check_text(what, value)
        if status is not None:
            check_choice("status", status, list(Status))
        check_number("limit", limit, 1, 1_000)
        database = await self.context.database()
        of = None if workflow is None else group_id(workflow, "workflow")
        ids = await jobs.list_ids(database, name, None if status is None else str(status), key, limit, reason, of)
        if name is not None and not ids:
            known = [type.name for type in await type_queries.job_types(database)]
            if name not in known and not await jobs.list_ids(database, name, None, None, 1):
                raise no_such_type(name, known)
        found = await opening.find(self.context, ids)
        return [found[id] for id in ids if id in found]

    async def cancel(self, id: UUID | str) -> str:
        """Cancel a job. Returns "cancelled" for a queued job, "cancelling" for a running one, and otherwise its status.

        Args:
            id: Id of the job.
        """
        return await jobs.cancel(await self.context.database(), parse_id(id))

    async def set_priority(self, id: UUID | str, priority: int) -> bool:
        """Give a job that waits another priority; it stands behind those of its type that have it already.

        Args:
            id: Id of the job.
            priority: -100 (first) to 100 (last).

        Returns:
            Whether it has another priority now. A job that runs or has ended stays as it is, and so does one of a pool.

        Raises:
            InvalidInput: It is no priority.
        """
        check_number("priority", priority, -100, 100)
        wanted = parse_id(id)
        return wanted in await jobs.set_priority(await self.context.database(), [wanted], priority)

    async def run_now(self, id: UUID | str) -> bool:
        """Make a job that waits for its time, or for a further attempt, due at once.

        Args:
            id: Id of the job.

        Returns:
            Whether it was deferred. Any other job stays as it is: one that is ready, runs, has ended, or waits for others.
        """
        wanted = parse_id(id)
        return wanted in await jobs.run_now(await self.context.database(), [wanted])

    async def replay(
        self, id: UUID | str, *, new_id: UUID | str | None = None, data: Any = None, force: bool = False
    ) -> Enqueued:
        """Enqueue a copy of a running or finished job, with `data` as its payload, or (None) with its own.

        Args:
            id: Id of the job.
            new_id: Id of the copy, so that a repeated call replays once; None: a new UUIDv7.
            data: Payload of the copy; None: the payload of the job.
            force: Whether to replay also while an earlier replay of the job waits, runs or has succeeded.

        Raises:
            NotFound: The job does not exist.
            Conflict: The job is queued, was replayed already, or has a payload that cannot be read.
        """
        check_flag("force", force)
        new = parse_id(new_id) if new_id is not None else make_id()
        database = await self.context.database()
        text = None if data is None else dump_json(data, f"the copy of {id}")
        if self.context.keyring:
            text = await self._sealed_copy(database, parse_id(id), text)
        return Enqueued(await jobs.replay(database, parse_id(id), new, text, force=force), EnqueueOutcome.QUEUED)

    async def _sealed_copy(self, database: Database, id: UUID, text: str | None) -> str | None:
        """The payload of a copy of a job: encrypted when its type is. None: the payload of the job as it is stored."""
        found = (await jobs.find(database, [id])).get(id)
        type = None if found is None else self.types.get(found.name)
        if found is None or type is None or not type.declared.encrypted:
            return text
        if text is None:
            # A job from before the type was encrypted.
            return None if is_envelope(found.data) else type.codec.dump(found.data)
        return type.codec.dump(load_json(text))

    async def job_types(self) -> list[JobTypeRecord]:
        """All job types in the database."""
        return await type_queries.job_types(await self.context.database())

    async def handlers(self) -> list[HandlerRecord]:
        """What workers say of their handlers, by name: schema of the payloads, documentation, owner."""
        return await type_queries.handlers(await self.context.database())

    async def create_job_type(self, name: str, **options: Any) -> JobTypeRecord:
        """Create a job type in the database, options by their names in SQL. Raises `Conflict`, `InvalidInput`.

        Args:
            name: Name of the job type.
            options: Options by the names that `penstock.create_job_type` has for them.
        """
        check_type_name(name)
        return await type_queries.create_job_type(await self.context.database(), name, options)

    async def change_job_type(self, name: str, **options: Any) -> JobTypeRecord:
        """Change options of a job type in the database, by their names in SQL. Raises `NotFound`, `InvalidInput`.

        Args:
            name: Name of the job type.
            options: Options to change, by the names that `penstock.change_job_type` has for them.
        """
        check_type_name(name)
        return await type_queries.change_job_type(await self.context.database(), name, options)

    async def drop_job_type(self, name: str, *, force: bool = False) -> None:
        """Drop a job type. What is archived of its jobs stays.

        An application that declares the type creates it again when it starts. Jobs that other transactions enqueue at the same
        time are archived as cancelled, with the reason `dropped`.

        Args:
            name: Name of the job type.
            force: Whether to drop it also while jobs wait, at most 10,000, which are archived as cancelled with the reason
                `dropped`.

        Raises:
            NotFound: There is no such job type.
            Conflict: Jobs of it wait or run, or it is a pool, the queue of a subscriber, or the type of a schedule.
            DatabaseUnavailable: Another transaction has locked the type; try again.
        """
        check_type_name(name)
        check_flag("force", force)
        database = await self.context.database()
        await type_queries.drop_job_type(database, name, force=force)
        database.declared.pop(("job", name), None)

    async def pause(self, name: str) -> None:
        """Pause a type: its jobs are no longer claimed, and running jobs continue. Raises `NotFound`.

        Args:
            name: Name of the job type.
        """
        check_type_name(name)
        await type_queries.pause(await self.context.database(), name)

    async def resume(self, name: str) -> None:
        """End a pause. Raises `NotFound`, `Conflict`.

        Args:
            name: Name of the job type.
        """
        check_type_name(name)
        await type_queries.resume(await self.context.database(), name)

    async def counts(self) -> list[JobCounts]:
        """Number of jobs of each type, by status."""
        return await type_queries.counts(await self.context.database())

    async def top(self, by: str, *, order: str = "ready", name: str | None = None, limit: int = 20) -> list[TopRecord]:
        """What fills the queue: the job types or the keys that come first in an order.

        The work is bounded: up to 50,000 ready and running jobs are counted exactly, and as many deferred ones. When there are
        more, a random sample of 2,000 pages (16 MiB) of the queue is looked at.

        Args:
            by: "types" or "keys".
            order: "ready" (most ready jobs first), "oldest" (the longest wait first) or "busy" (most finished jobs first).
            name: Only this job type; None: all.
            limit: Most records: 1 to 1,000.

        Raises:
            InvalidInput: An argument is not valid.
        """
        check_top(by, order, name, limit)
        return await top(await self.context.database(), by, order=order, names=None if name is None else [name], limit=limit)


def _name_of(type: Any) -> str:
    """The name of a job type, which is given as a `JobType` or by its name. Raises `InvalidInput` for anything else."""
    if isinstance(type, JobType):
        return type.name
    if isinstance(type, str):
        return type
    raise InvalidInput(f"type must be a job type or its name, not {type!r:.100}")
