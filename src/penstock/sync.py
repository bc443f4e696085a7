"""The blocking half of penstock.app.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Unpack
    from uuid import UUID

    from penstock.core.blocking import BackgroundLoop
    from penstock.jobs.group_record import JobGroupRecord
    from penstock.jobs.job_type import JobType
    from penstock.jobs.models import Enqueued, GroupReference, NewJob, NewJobOptions
    from penstock.jobs.records import HandlerRecord, JobCounts, JobRecord, JobTypeRecord, Status, Why
    from penstock.jobs.scaling import ScaleAdvice
    from penstock.jobs.steps import StepRecord
    from penstock.jobs.top import TopRecord
    from penstock.pools.models import PoolDetails
    from penstock.pools.sync import SyncPool
    from penstock.postgres.migrate import Migrated, MigrationPlan
    from penstock.schedules.schedule import ScheduleRecord, ScheduleRun
    from penstock.streams.models import StreamRecord, StreamSummary
    from penstock.streams.sync import SyncStream
    from penstock.topics.models import TopicCounts
    from penstock.topics.sync import SyncTopic
    from penstock.worker.findings import Finding
    from penstock.worker.fleets import FleetRecord, WorkerRecord
    from penstock.worker.leader import LeaderRecord
    from penstock.worker.overview import Overview
    from penstock.workflows.models import WorkflowRunRecord, WorkflowStepRecord
T = TypeVar("T")


class SyncPenstock:
    """The blocking half of `Penstock`, for threads without an event loop: `Penstock.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def open(self, *, timeout: timedelta = timedelta(0)) -> None:
        """Connect: start the embedded server if no URL is configured, check (embedded: migrate) the schema, and `declare`.

        Every call opens the application implicitly when needed.

        Args:
            timeout: How long to wait for a database that does not answer; services give `settings.start_timeout`.

        Raises:
            DatabaseUnavailable: The database does not answer.
            SchemaMismatch: The schema is missing, or of another version.
            EmbeddedServerError: The embedded server does not start.
            InvalidInput, Conflict: The database refuses a declaration.
        """
        self._loop.run(self._of.open(timeout=timeout), wait=timeout)

    def declare(self) -> list[str]:
        """Write the declarations of this application into the database, with the options in the code.

        These are job types, pools, topics, streams, subscriptions without a time to live, schedules, and tasks of the leader.
        `penstock declare MODULE:APP` writes them at deployment, and a worker those that it works on when it starts. `open` writes
        all but schedules and tasks. An administrator's change remains in effect until the code declares other options. What was
        dropped is created again by all of these, but not by a call that opens the application implicitly, such as an enqueue.

        Returns:
            Names of the declared objects, such as "job invoice-shipments".

        Raises:
            InvalidInput, Conflict: The database refuses a declaration.
            PenstockError: The role may not declare.
        """
        return self._loop.run(self._of.declare())

    def start_server(self) -> str:
        """Return the URL of the database, and start the embedded server when no URL is configured."""
        return self._loop.run(self._of.start_server())

    def close(self) -> None:
        """Close the connections of this loop. The embedded server stops when no process uses it any more."""
        self._loop.close(self._of.close())

    def __enter__(self) -> Self:
        self._loop.run(self._of.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def migrate(self, *, timeout: timedelta = timedelta(0)) -> Migrated:
        """Bring the schema to this version. `timeout` as in `open`."""
        return self._loop.run(self._of.migrate(timeout=timeout), wait=timeout, unlimited=True)

    def plan_migration(self) -> MigrationPlan:
        """What `migrate` would change now, and the statements with which it would: it runs them, and rolls them back.

        Raises:
            SchemaMismatch: `migrate` would be refused.
        """
        return self._loop.run(self._of.plan_migration())

    def find(self, id: UUID | str) -> JobRecord:
        """The record of a job, from a lake of history when the archive no longer has it. Raises `NotFound`.

        What is encrypted is decrypted with the keys of this application; see `JobRecord`.

        Args:
            id: Id of the job.
        """
        return self._loop.run(self._of.find(id))

    def wait(self, id: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> JobRecord:
        """Wait until a job is finished.

        Args:
            id: Id of the job.
            timeout: How long to wait.

        Raises:
            JobFailed: The job ended without success.
            NotFound: The job does not exist.
            TimeoutError: The job was not finished in time.
        """
        return self._loop.run(self._of.wait(id, timeout=timeout), wait=timeout)

    def scale_advice(
        self, *, wait: timedelta = timedelta(seconds=5), over: timedelta = timedelta(minutes=1)
    ) -> list[ScaleAdvice]:
        """Scaling advice for each job type: how long jobs wait, and how many workers keep the wait below `wait`.

        Args:
            wait: How long a ready job may wait.
            over: Length of the recent past whose load is measured.
        """
        return self._loop.run(self._of.scale_advice(wait=wait, over=over))

    def prune(self, keep: timedelta | None = None) -> dict[str, int]:
        """Drop the parts of the archive whose jobs were kept for long enough, and topic messages that no copy refers to then.

        Also deletes what came back from lakes and is older than the setting `keep_history`. Returns the number of dropped jobs by
        partition.

        Args:
            keep: How long finished jobs are kept whose type does not say it, and messages; None: for ever.
        """
        return self._loop.run(self._of.prune(keep), unlimited=True)

    def subscribe(self, *declared: JobType[Any]) -> None:
        """Subscribe those of the job types that are queues of subscribers to their topics. A worker does so when it starts.

        Args:
            declared: Job types; those that are no queues of subscribers are left out.
        """
        self._loop.run(self._of.subscribe(*declared))

    def enqueue(
        self, type: JobType[T] | str, data: T | None = None, *, connection: Any = None, **options: Unpack[NewJobOptions]
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
        return self._loop.run(self._of.enqueue(type, data, connection=connection, **options), connection=connection)

    def enqueue_many(self, type: JobType[T] | str, new: Iterable[NewJob | T], *, connection: Any = None) -> list[Enqueued]:
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
        return self._loop.run(self._of.enqueue_many(type, new, connection=connection), connection=connection)

    def why(self, id: UUID | str) -> Why:
        """Why a job waits: the first condition that must change before it can start. Raises `NotFound`.

        Args:
            id: Id of the job.
        """
        return self._loop.run(self._of.why(id))

    def find_many(
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
        return self._loop.run(
            self._of.find_many(name=name, status=status, key=key, reason=reason, workflow=workflow, limit=limit)
        )

    def cancel(self, id: UUID | str) -> str:
        """Cancel a job. Returns "cancelled" for a queued job, "cancelling" for a running one, and otherwise its status.

        Args:
            id: Id of the job.
        """
        return self._loop.run(self._of.cancel(id))

    def set_priority(self, id: UUID | str, priority: int) -> bool:
        """Give a job that waits another priority; it stands behind those of its type that have it already.

        Args:
            id: Id of the job.
            priority: -100 (first) to 100 (last).

        Returns:
            Whether it has another priority now. A job that runs or has ended stays as it is, and so does one of a pool.

        Raises:
            InvalidInput: It is no priority.
        """
        return self._loop.run(self._of.set_priority(id, priority))

    def run_now(self, id: UUID | str) -> bool:
        """Make a job that waits for its time, or for a further attempt, due at once.

        Args:
            id: Id of the job.

        Returns:
            Whether it was deferred. Any other job stays as it is: one that is ready, runs, has ended, or waits for others.
        """
        return self._loop.run(self._of.run_now(id))

    def replay(self, id: UUID | str, *, new_id: UUID | str | None = None, data: Any = None, force: bool = False) -> Enqueued:
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
        return self._loop.run(self._of.replay(id, new_id=new_id, data=data, force=force))

    def job_types(self) -> list[JobTypeRecord]:
        """All job types in the database."""
        return self._loop.run(self._of.job_types())

    def handlers(self) -> list[HandlerRecord]:
        """What workers say of their handlers, by name: schema of the payloads, documentation, owner."""
        return self._loop.run(self._of.handlers())

    def create_job_type(self, name: str, **options: Any) -> JobTypeRecord:
        """Create a job type in the database, options by their names in SQL. Raises `Conflict`, `InvalidInput`.

        Args:
            name: Name of the job type.
            options: Options by the names that `penstock.create_job_type` has for them.
        """
        return self._loop.run(self._of.create_job_type(name, **options))

    def change_job_type(self, name: str, **options: Any) -> JobTypeRecord:
        """Change options of a job type in the database, by their names in SQL. Raises `NotFound`, `InvalidInput`.

        Args:
            name: Name of the job type.
            options: Options to change, by the names that `penstock.change_job_type` has for them.
        """
        return self._loop.run(self._of.change_job_type(name, **options))

    def drop_job_type(self, name: str, *, force: bool = False) -> None:
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
        self._loop.run(self._of.drop_job_type(name, force=force))

    def pause(self, name: str) -> None:
        """Pause a type: its jobs are no longer claimed, and running jobs continue. Raises `NotFound`.

        Args:
            name: Name of the job type.
        """
        self._loop.run(self._of.pause(name))

    def resume(self, name: str) -> None:
        """End a pause. Raises `NotFound`, `Conflict`.

        Args:
            name: Name of the job type.
        """
        self._loop.run(self._of.resume(name))

    def counts(self) -> list[JobCounts]:
        """Number of jobs of each type, by status."""
        return self._loop.run(self._of.counts())

    def top(self, by: str, *, order: str = "ready", name: str | None = None, limit: int = 20) -> list[TopRecord]:
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
        return self._loop.run(self._of.top(by, order=order, name=name, limit=limit))

    def find_pool(self, name: str) -> SyncPool[Any]:
        """An existing pool, whether this application declares it or not. Raises `NotFound`.

        Args:
            name: Name of the pool.
        """
        return self._loop.run(self._of.find_pool(name)).sync

    def list_pools(self) -> list[PoolDetails]:
        """All pools in the database, by name."""
        return self._loop.run(self._of.list_pools())

    def create_pool(self, name: str, *, convert: bool = False, **options: Any) -> PoolDetails:
        """Create a pool in the database, options by their names in SQL. An existing pool does not change.

        Args:
            name: Name of the pool and of its job type.
            convert: Turn the plain job type of this name, with its jobs, into a pool.
            options: `slots`, `assignor`, `on_retry`, `key_concurrency`, ...; and those of its job type, such as `max_waiting`.

        Raises:
            Conflict: A plain job type has this name, and `convert` is not given.
            InvalidInput: An option is not valid.
        """
        return self._loop.run(self._of.create_pool(name, convert=convert, **options))

    def drop_pool(self, name: str, *, force: bool = False) -> None:
        """Drop a pool with its job type, its keys and its standing jobs. What is archived of its jobs stays.

        See `drop_job_type`.

        Args:
            name: Name of the pool.
            force: Whether to drop it also while it has standing jobs, or up to 10,000 jobs wait, which are archived as cancelled
                with the reason `dropped`.

        Raises:
            NotFound: There is no such pool.
            Conflict: It has live workers or standing jobs, or jobs of it wait or run.
            DatabaseUnavailable: Another transaction has locked the type; try again.
        """
        self._loop.run(self._of.drop_pool(name, force=force))

    def find_topic(self, name: str) -> SyncTopic[Any]:
        """An existing topic, whether or not this app declares it. Raises `NotFound`.

        Args:
            name: Name of the topic.
        """
        return self._loop.run(self._of.find_topic(name)).sync

    def topic_counts(self) -> list[TopicCounts]:
        """Counts of each topic."""
        return self._loop.run(self._of.topic_counts())

    def find_stream(self, name: str, payload: Any = Any) -> SyncStream[Any]:
        """An existing stream, whether or not this app declares it. Raises `NotFound`.

        Args:
            name: Name of the stream.
            payload: Type of its payloads; the events have values of it.
        """
        return self._loop.run(self._of.find_stream(name, payload)).sync

    def list_streams(self) -> list[StreamSummary]:
        """All streams in the database, by name, and how large they are."""
        return self._loop.run(self._of.list_streams())

    def create_stream(self, name: str, partitions: int = 16, **options: Any) -> StreamRecord:
        """Create a stream in the database, options by their names in SQL. Raises `Conflict`, `InvalidInput`.

        Args:
            name: Name of the stream.
            partitions: Number of its partitions.
            options: Options of `StreamOptions`.
        """
        return self._loop.run(self._of.create_stream(name, partitions, **options))

    def drop_stream(self, name: str, *, force: bool = False) -> None:
        """Drop a stream with its events and groups, whether or not this app declares it. See `Stream.drop`.

        Args:
            name: Name of the stream.
            force: Whether to drop it also while consumers are at work.
        """
        self._loop.run(self._of.drop_stream(name, force=force))

    def list_schedules(self) -> list[ScheduleRecord]:
        """All schedules in the database, with their next time and the outcome of their last run."""
        return self._loop.run(self._of.list_schedules())

    def schedule_runs(self, name: str, *, status: Status | str | None = None, limit: int = 20) -> list[ScheduleRun]:
        """The last runs of a schedule, latest first, as far as the archive goes; none when it runs in place.

        Args:
            name: Name of the schedule.
            status: Only runs with this status, such as "failed"; None: all.
            limit: Maximum number of runs, at most 1,000.

        Raises:
            NotFound: The schedule does not exist.
        """
        return self._loop.run(self._of.schedule_runs(name, status=status, limit=limit))

    def run_schedule(self, name: str, *, key: str | None = None) -> UUID | None:
        """Run a schedule now, beside its times.

        Args:
            name: Name of the schedule.
            key: Key of the run; None: that of the declared rule, where this application declares the schedule, or none.

        Returns:
            The job of the run; None when a worker runs the schedule in place, as soon as it can.

        Raises:
            NotFound: The schedule does not exist.
            Conflict: A run has not ended, or each worker runs the schedule by itself.
            InvalidInput: The key is not valid, or the schedule runs in place, so that a run has no key.
        """
        return self._loop.run(self._of.run_schedule(name, key=key))

    def drop_schedule(self, name: str) -> None:
        """Drop a schedule that was removed from the code; the job type and the history of its runs remain.

        Args:
            name: Name of the schedule.

        Raises:
            NotFound: The schedule does not exist.
            Conflict: A running worker declares it.
        """
        self._loop.run(self._of.drop_schedule(name))

    def leaders(self) -> list[LeaderRecord]:
        """The tasks of the leader in the database, by name: which worker leads, since when, and what became of the task."""
        return self._loop.run(self._of.leaders())

    def workers(self) -> list[WorkerRecord]:
        """All workers: where they run, what they work on, and whether they live."""
        return self._loop.run(self._of.workers())

    def overview(self) -> Overview:
        """How everything is doing: what is wrong first, then how much waits, runs and finishes. `penstock top` shows it.

        It counts no whole queue, and costs the database some tens of milliseconds, whatever the size of the queue.
        """
        return self._loop.run(self._of.overview())

    def drain_worker(self, id: str) -> str:
        """Let one worker of a fleet finish what it runs, and end.

        Args:
            id: Id of the worker, as `workers` lists it.

        Returns:
            The name of its fleet.

        Raises:
            NotFound: There is no such worker.
            Conflict: It is of no fleet: its process ends in an orderly way by SIGTERM.
        """
        return self._loop.run(self._of.drain_worker(id))

    def doctor(self) -> list[Finding]:
        """What is wrong with the database and the workers, and what to do about it: what `penstock doctor` shows.

        A database that does not answer, and a schema that does not fit, are findings. The application need not be open.
        """
        return self._loop.run(self._of.doctor())

    def fleets(self) -> list[FleetRecord]:
        """All fleets of workers on Spark, and how many of their workers are present."""
        return self._loop.run(self._of.fleets())

    def drain_fleet(self, name: str) -> None:
        """Let the workers of a fleet finish what they run, and end.

        Args:
            name: Name of the fleet.

        Raises:
            NotFound: There is no such fleet.
        """
        self._loop.run(self._of.drain_fleet(name))

    def job_groups(self, *, open: bool = False, limit: int = 50) -> list[JobGroupRecord]:
        """Job groups, latest first.

        Args:
            open: Whether only those that have not ended.
            limit: Maximum number, at most 1,000.
        """
        return self._loop.run(self._of.job_groups(open=open, limit=limit))

    def find_group(self, group: UUID | str) -> JobGroupRecord:
        """A job group by its id or its name. Raises `NotFound`.

        Args:
            group: Id of the group, a UUID; or its name.
        """
        return self._loop.run(self._of.find_group(group))

    def cancel_group(self, group: UUID | str) -> JobGroupRecord:
        """Cancel the children of a job group, and its `then`. Raises `NotFound`.

        Args:
            group: Id of the group, a UUID; or its name.

        Returns:
            The group. It ends when its children have ended.
        """
        return self._loop.run(self._of.cancel_group(group))

    def signal(self, id: UUID | str, name: str, value: Any = None, *, connection: Any = None) -> bool:
        """Send a signal to a job, which its handler gets from `Job.wait_for`. It may wait already, or come to the wait later.

        The first signal of a name counts. A repeated call is harmless.

        Args:
            id: Id of the job.
            name: Name of the signal, for which the handler waits.
            value: What the handler gets: JSON, or what pydantic makes JSON of, at most 256 KiB.
            connection: Connection through which to signal, in its transaction; see `Penstock.enqueue`.

        Returns:
            Whether this signal was the first: False when there was one of this name, or the wait for it had timed out.

        Raises:
            NotFound: There is no such job.
            Conflict: The job has ended.
            InvalidInput: The name or the value is not valid.
        """
        return self._loop.run(self._of.signal(id, name, value, connection=connection), connection=connection)

    def steps(self, id: UUID | str, *, after: str | None = None, limit: int = 1000) -> list[StepRecord]:
        """The durable steps of a job, in their order, and the signals for which it does not wait yet.

        A step has up to 256 KiB: ask for fewer at once where results are large.

        Args:
            id: Id of the job; one that is not known has no steps.
            after: Cursor of the last step of the page before.
            limit: Maximum number of steps, at most 1,000.
        """
        return self._loop.run(self._of.steps(id, after=after, limit=limit))

    def group_of(self, job: UUID | str) -> JobGroupRecord | None:
        """The job group of a job, with the numbers of its children. A child that runs can add children: `options(group=...)`.

        Args:
            job: Id of the job, which may run or have ended.

        Returns:
            Of the `then` of a group that group, of a child the group in which it is, as an enqueue takes it; None: the job is in
            no group, or its group was pruned.
        """
        return self._loop.run(self._of.group_of(job))

    def workflow_runs(self, workflow: str | None = None, *, open: bool = False, limit: int = 50) -> list[WorkflowRunRecord]:
        """Runs of workflows, latest first.

        Args:
            workflow: Name of the workflow; None: all.
            open: Whether only those that have not ended.
            limit: Maximum number, at most 1,000.
        """
        return self._loop.run(self._of.workflow_runs(workflow, open=open, limit=limit))

    def find_workflow_run(self, run: UUID | str) -> WorkflowRunRecord:
        """A run of a workflow. Raises `NotFound`.

        Args:
            run: What `Workflow.start` returned, or the id that it was given.
        """
        return self._loop.run(self._of.find_workflow_run(run))

    def workflow_steps(self, run: UUID | str) -> list[WorkflowStepRecord]:
        """The steps of a run, each behind those after which it runs, with status and times. Raises `NotFound`.

        Args:
            run: See `find_workflow_run`.
        """
        return self._loop.run(self._of.workflow_steps(run))

    def cancel_workflow(self, run: UUID | str) -> WorkflowRunRecord:
        """Cancel a run: its steps that wait, are queued or run, and the jobs of its groups. Raises `NotFound`.

        Args:
            run: See `find_workflow_run`.

        Returns:
            The run. It ends when its steps have ended; one that has ended stays as it is.
        """
        return self._loop.run(self._of.cancel_workflow(run))

    def retry_workflow(self, run: UUID | str, *, from_step: str | None = None, id: str | None = None) -> WorkflowRunRecord:
        """Retry a run that has ended, as a new run, which shares the results of the steps that are not run again.

        To call it again is the same new run.

        Args:
            run: See `find_workflow_run`.
            from_step: Name of a step from which on it runs again, also when it succeeded; None: the steps that did not succeed.
            id: Id of the new run; None: that of the run with `~2`, `~3` and so on.

        Returns:
            The new run.

        Raises:
            NotFound: The run does not exist.
            InvalidInput: It has no such step.
            Conflict: It has not ended, was retried otherwise, or each step succeeded.
        """
        return self._loop.run(self._of.retry_workflow(run, from_step=from_step, id=id))

    def wait_for_workflow(self, run: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> WorkflowRunRecord:
        """Wait until a run has ended.

        Args:
            run: See `find_workflow_run`.
            timeout: How long to wait.

        Returns:
            The run, however it ended.

        Raises:
            NotFound: The run does not exist.
            TimeoutError: It has not ended in time.
        """
        return self._loop.run(self._of.wait_for_workflow(run, timeout=timeout), wait=timeout)
