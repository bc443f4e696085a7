"""The blocking half of penstock.pools.pool.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime, timedelta
    from typing import Any, Unpack
    from uuid import UUID

    from penstock.core.blocking import BackgroundLoop
    from penstock.groups import queries as ownership
    from penstock.jobs.group_record import JobGroupRecord
    from penstock.jobs.models import Enqueued, KeyedJobOptions, NewJob
    from penstock.pools.models import KeyedJob, KeyState, PausedKey, PoolDetails, PoolMember, QuarantinedKey, StandingState
T = TypeVar("T")


class SyncPool(Generic[T]):
    """The blocking half of `Pool`, for threads without an event loop: `Pool.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def start(self, key: str, data: Any = None, *, replace: bool = False, timeout: timedelta | None = None) -> str:
        """Start the standing job of a key: it runs on the owner of the key, and moves with it, until `stop`.

        Args:
            key: Key of the standing job.
            data: Payload.
            replace: Whether to replace the payload when the standing job exists with another one.
            timeout: How long to wait until its start side has succeeded on a worker; None: return when the start is written.

        Returns:
            "starting", "unchanged" when it exists with this payload, or "replaced"; with a timeout "started" for "starting".

        Raises:
            Conflict: It exists with another payload, and `replace` is not given.
            JobFailed: Its start side failed, it is quarantined, or the owner of its key has no handler for standing jobs. It runs
                later by itself, unless it is quarantined.
            TimeoutError: It did not run in time, for example because there is no worker.
        """
        return self._loop.run(self._of.start(key, data, replace=replace, timeout=timeout), wait=timeout)

    def stop(self, key: str) -> bool:
        """Stop the standing job of a key, wherever it runs. False when there was none.

        Args:
            key: Key of the standing job.
        """
        return self._loop.run(self._of.stop(key))

    def notify(self, key: str, message: Any) -> None:
        """Send a message, any JSON, to the standing job of a key. Raises `NotFound`.

        Args:
            key: Key of the standing job.
            message: Any JSON value.
        """
        self._loop.run(self._of.notify(key, message))

    def reconcile(self, wanted: Mapping[str, Any]) -> tuple[int, int, int]:
        """Make the standing jobs equal to a wanted set, payloads by key, in one transaction.

        Args:
            wanted: Payload of each standing job that has to run, by key.

        Returns:
            How many were started, replaced because their payload differs, and stopped.
        """
        return self._loop.run(self._of.reconcile(wanted))

    def standing_jobs(self) -> list[StandingState]:
        """All standing jobs, and where they run. Raises `NotFound`."""
        return self._loop.run(self._of.standing_jobs())

    def enqueue(self, key: str, data: T | None = None, *, connection: Any = None, **options: Unpack[KeyedJobOptions]) -> Enqueued:
        """Enqueue one job behind the others of its key. See `Penstock.enqueue`.

        A job for later (`run_after`) joins the jobs of its key when it is due.

        Args:
            key: Key of the job.
            data: Payload; None: an empty object, unless the type of the payload has None.
            connection: See `Penstock.enqueue`.
            options: Fields of `NewJob`: `id`, `run_after`, `expires_at`, `unique`, ...
        """
        return self._loop.run(self._of.enqueue(key, data, connection=connection, **options), connection=connection)

    def enqueue_many(self, new: Iterable[NewJob | tuple[str, T]], *, connection: Any = None) -> list[Enqueued]:
        """Enqueue many jobs: `NewJob` with a key, or pairs of key and payload. See `Penstock.enqueue_many`."""
        return self._loop.run(self._of.enqueue_many(new, connection=connection), connection=connection)

    def worker(
        self, id: str | None = None, *, prefetch: int = 10, metadata: Mapping[str, Any] | None = None
    ) -> SyncPoolWorker[T]:
        """A pull worker: the program asks for jobs, instead of declaring a handler.

            with pool.worker("my-worker") as worker:
                for job in worker.jobs():
                    ...
                    job.ack()

        Args:
            id: Id of the worker, unique in the pool; None: a new one.
            prefetch: The largest number of jobs claimed and not settled at once, each of another key.
            metadata: Metadata that the worker publishes, for the pool's `assign`.
        """
        return self._of.worker(id, prefetch=prefetch, metadata=metadata).sync

    def declare(self) -> None:
        """Create the pool in the database, or change it when this declaration differs from the last one."""
        self._loop.run(self._of.declare())

    def details(self) -> PoolDetails:
        """The options of the pool in the database, its slots, and the number of waiting jobs. Raises `NotFound`."""
        return self._loop.run(self._of.details())

    def workers(self) -> list[PoolMember]:
        """The workers, oldest first, with their slots; the last one, without an id, stands for slots that no worker owns."""
        return self._loop.run(self._of.workers())

    def slots(self) -> list[ownership.Slot]:
        """The slots with their owners and targets."""
        return self._loop.run(self._of.slots())

    def resize(self, slots: int) -> None:
        """Give the live pool more slots; only keys that go to new slots move. Set `slots` in the declaration too.

        Args:
            slots: Number of slots that the pool gets.

        Raises:
            Conflict: The pool has more slots already, or has an `assign` of its own.
            DatabaseUnavailable: A transaction that enqueues has been open for seconds; try again.
        """
        self._loop.run(self._of.resize(slots))

    def drain(self, worker: str) -> PoolMember:
        """Drain a worker: it stays in the pool, without slots. Raises `NotFound`.

        Args:
            worker: Id of the worker in the pool.
        """
        return self._loop.run(self._of.drain(worker))

    def undrain(self, worker: str) -> PoolMember:
        """Let a drained worker take part again. Raises `NotFound`.

        Args:
            worker: Id of the worker in the pool.
        """
        return self._loop.run(self._of.undrain(worker))

    def state(self, key: str) -> KeyState:
        """What is known of a key: its owner, what runs, what waits and for what, since when it is paused or quarantined.

        Raises `NotFound`.

        Args:
            key: The key.
        """
        return self._loop.run(self._of.state(key))

    def pause_key(self, key: str) -> datetime:
        """Pause a key: its jobs wait, and those of other keys go on. Returns since when it is paused.

        Running jobs finish, and its standing job goes on. Jobs that its worker claimed ahead and has not started go back to their
        places. The pause lasts until `resume_key`, whatever restarts. A second call changes nothing.

        Args:
            key: The key.

        Raises:
            NotFound: The pool does not exist.
            InvalidInput: This cannot be a key.
        """
        return self._loop.run(self._of.pause_key(key))

    def resume_key(self, key: str) -> bool:
        """End the pause of a key. Returns False when it was not paused. Raises `NotFound`.

        Args:
            key: The key.
        """
        return self._loop.run(self._of.resume_key(key))

    def paused_keys(self, *, after: str | None = None, limit: int = 100) -> list[PausedKey]:
        """The paused keys, since when each is paused, and how many jobs it has. At most `limit`, behind the key `after`.

        Args:
            after: Last key of the page before; None: the first page.
            limit: Largest number of keys.
        """
        return self._loop.run(self._of.paused_keys(after=after, limit=limit))

    def quarantined_keys(self, *, after: str | None = None, limit: int = 100) -> list[QuarantinedKey]:
        """Keys for which the pool's `assign` fails, with the errors; their jobs wait. At most `limit`, behind the key `after`.

        Args:
            after: Last key of the page before; None: the first page.
            limit: Largest number of keys.
        """
        return self._loop.run(self._of.quarantined_keys(after=after, limit=limit))

    def release_key(self, key: str) -> None:
        """Have `assign` called again for a quarantined key, now. Raises `NotFound` when the key is not quarantined.

        Args:
            key: The key.
        """
        self._loop.run(self._of.release_key(key))

    def set_weight(self, key: str, weight: int) -> None:
        """Set the weight of a key: the number of its jobs that start in a turn, 1 to 1,000. Raises `InvalidInput`.

        Args:
            key: The key.
            weight: Number of jobs in a turn.
        """
        self._loop.run(self._of.set_weight(key, weight))

    def weights(self) -> dict[str, int]:
        """The weights that were set, by key, at most 10,000. Raises `NotFound`."""
        return self._loop.run(self._of.weights())

    def list(self, *, key: str | None = None, after: str | None = None, limit: int = 100) -> list[KeyedJob]:
        """The jobs that wait or run: those in the queues of their keys, by key and in order, then those that are deferred.

        Args:
            key: Only jobs of this key.
            after: Cursor of the last job of the page before.
            limit: Maximum number of jobs, at most 1,000.

        Raises:
            NotFound: The pool does not exist.
        """
        return self._loop.run(self._of.list(key=key, after=after, limit=limit))


class SyncPoolWorker(Generic[T]):
    """The blocking half of `PoolWorker`, for threads without an event loop: `PoolWorker.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def __enter__(self) -> Self:
        self._loop.run(self._of.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.run(self._of.__aexit__(*error))

    @property
    def slots(self) -> list[int]:
        """The slots that this worker owns at this moment."""
        return self._loop.call(lambda: self._of.slots)

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Publish other metadata of this worker; a pool with its own `assign` places its keys again.

        Args:
            metadata: A JSON object, which `assign` gets.
        """
        self._loop.run(self._of.set_metadata(metadata))

    def jobs(self) -> Iterator[SyncPulledJob[T]]:
        """The jobs of the keys that this worker owns, as they arrive, one of each key at a time.

        The iteration goes on after a request that was cancelled, as by a time limit, or interrupted.

        Raises:
            Conflict: This worker was declared dead, and another one has its id now.
            SchemaMismatch: A migration has changed the schema so that this version cannot work with it.
        """
        return self._loop.each(self._of.jobs(), lambda item: item.sync)

    @property
    def id(self) -> str:
        """See `PoolWorker`."""
        return self._of.id


class SyncPulledJob(Generic[T]):
    """The blocking half of `PulledJob`, for threads without an event loop: `PulledJob.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def ack(self, result: Any = None) -> None:
        """Settle the job as succeeded. Returns when that is written.

        Args:
            result: Result of the job, kept when its type has `keep_result`.

        Raises:
            Conflict: The job no longer belongs to this worker; another one runs it, or will run it.
        """
        self._loop.run(self._of.ack(result))

    def fail(self, error: str | BaseException, *, retry: bool = True, after: timedelta | None = None) -> None:
        """Settle the attempt as failed. The job is retried, `after` a delay or the backoff of the pool, while attempts are left.

        Args:
            error: Error of the attempt, as an exception or a text.
            retry: Whether the job may be retried.
            after: Delay before the next attempt; None: the backoff of the pool.

        Raises:
            Conflict: The job no longer belongs to this worker.
        """
        self._loop.run(self._of.fail(error, retry=retry, after=after))

    def snooze(self, duration: timedelta) -> None:
        """Put the job off without using up an attempt: it comes again after this time. See `Snooze`.

        Args:
            duration: How long the job waits.

        Raises:
            InvalidInput: The duration is not more than nothing, or too long.
            Conflict: The job no longer belongs to this worker.
        """
        self._loop.run(self._of.snooze(duration))

    def release(self) -> None:
        """Release the job as if it had not been pulled."""
        self._loop.run(self._of.release())

    def extend(self, duration: timedelta | None = None) -> None:
        """Extend the job's lease to `duration` from now (None: the visibility timeout).

        Args:
            duration: Length of the lease from now; None: the visibility timeout.

        Raises:
            Conflict: The job no longer belongs to this worker; stop working on it.
        """
        self._loop.run(self._of.extend(duration))

    def progress(self, value: Any) -> None:
        """Report the job's progress as any JSON value, shown beside the job. The last value is written about once a second.

        Args:
            value: Any JSON value.
        """
        self._loop.call(lambda: self._of.progress(value))

    def log(self, line: str) -> None:
        """Log a line with the job, where `find` and `penstock jobs show` show it, also when the job is finished.

        Lines are written about once a second. The newest 100 are kept, of each the first 1,000 characters.

        Args:
            line: Text of the line.

        Raises:
            InvalidInput: The line is not text.
        """
        self._loop.call(lambda: self._of.log(line))

    def finish(self, connection: Any, *, result: Any = None) -> None:
        """End the job as succeeded in your own transaction: exactly once, together with what the transaction does.

        The job is finished when the transaction commits. When it is rolled back, the job is not finished, and is retried. After
        the commit it does not matter how the handler ends. Call it last: while the transaction is open, `extend` is refused.

        Args:
            connection: Connection or session of asyncpg, psycopg, SQLAlchemy or Django with a transaction, in this database.
            result: Result of the job, any JSON, which is kept.

        Raises:
            Conflict: The job no longer belongs to this worker, or it runs in a process: do not commit.
            InvalidInput: The connection is of no supported kind, or has no transaction open.
        """
        self._loop.run(self._of.finish(connection, result=result), connection=connection)

    def group(self) -> JobGroupRecord | None:
        """The job group of this job, with the numbers of its children: of the `then` of a group that group, of a child its own.

            @app.job("report")
            async def report(job: Job[None]) -> None:
                group = job.group()
                print(group.succeeded, "of", group.added)

        Returns:
            The group, which an enqueue takes as `group=`; None: the job is in none.
        """
        return self._loop.run(self._of.group())

    @property
    def cancelled(self) -> bool:
        """Whether to stop: the job was cancelled, or its time limit has passed. A plain handler checks this in its loops."""
        return self._loop.call(lambda: self._of.cancelled)

    @property
    def id(self) -> UUID:
        """See `PulledJob`."""
        return self._of.id

    @property
    def name(self) -> str:
        """See `PulledJob`."""
        return self._of.name

    @property
    def key(self) -> str | None:
        """See `PulledJob`."""
        return self._of.key

    @property
    def attempt(self) -> int:
        """See `PulledJob`."""
        return self._of.attempt

    @property
    def max_attempts(self) -> int:
        """See `PulledJob`."""
        return self._of.max_attempts

    @property
    def data(self) -> T:
        """See `PulledJob`."""
        return self._of.data

    @property
    def created_at(self) -> datetime:
        """See `PulledJob`."""
        return self._of.created_at

    @property
    def snoozes(self) -> int:
        """See `PulledJob`."""
        return self._of.snoozes
