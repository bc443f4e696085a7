"""The blocking half of penstock.pools.pool.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime, timedelta
    from typing import Any, Unpack

    from penstock.core.blocking import BackgroundLoop
    from penstock.groups import queries as ownership
    from penstock.jobs.models import Enqueued, KeyedJobOptions, NewJob
    from penstock.pools.models import KeyedJob, KeyState, PausedKey, PoolDetails, PoolMember, QuarantinedKey, StandingState
    from penstock.pools.pool import Pool
    from penstock.worker.sync import SyncPoolWorker
T = TypeVar("T")


class SyncPool(Generic[T]):
    """The blocking half of `Pool`, for threads without an event loop: `Pool.sync`."""

    def __init__(self, of: Pool[T], loop: BackgroundLoop) -> None:
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
            data: Payload; None: an empty object.
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
