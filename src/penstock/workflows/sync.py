"""The blocking half of penstock.workflows.job_group.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any
    from uuid import UUID

    from penstock.core.blocking import BackgroundLoop
    from penstock.jobs.group_record import JobGroupRecord
    from penstock.jobs.job_type import JobCall, JobType
    from penstock.jobs.models import When
    from penstock.workflows.step import Step, StepReference


class SyncJobGroup:
    """The blocking half of `JobGroup`, for threads without an event loop: `JobGroup.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    @property
    def id(self) -> UUID:
        """Id of the group. Raises `InvalidInput` before it was opened."""
        return self._loop.call(lambda: self._of.id)

    def open(self) -> Self:
        """Open the group, or find the one of this name. The block of `with` does it.

        Raises:
            Conflict: It was opened with other options.
            NotFound: The job type of `then` does not exist.
        """
        self._loop.run(self._of.open())
        return self

    def seal(self) -> None:
        """Say that no more children come, apart from those that children of the group enqueue."""
        self._loop.run(self._of.seal())

    def cancel(self) -> None:
        """Cancel its children, the groups in it, and its `then`. A group that has ended stays as it is."""
        self._loop.run(self._of.cancel())

    def find(self) -> JobGroupRecord:
        """How many children it has, and how they ended so far."""
        return self._loop.run(self._of.find())

    def __enter__(self) -> Self:
        self._loop.run(self._of.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.run(self._of.__aexit__(*error))

    @property
    def name(self) -> str:
        """See `JobGroup`."""
        return self._of.name


class SyncWorkflow:
    """The blocking half of `Workflow`, for threads without an event loop: `Workflow.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    @property
    def steps(self) -> list[Step]:
        """The steps so far, each behind those after which it runs."""
        return self._loop.call(lambda: self._of.steps)

    def add(
        self,
        job: JobType[Any] | JobCall[Any],
        *args: Any,
        after: StepReference | Sequence[StepReference] | None = None,
        when: When | None = None,
        step: str | None = None,
        **kwargs: Any,
    ) -> Step:
        """Add a step that is one job.

        Args:
            job: Its job type, also with options of the job: `load.options(priority=-1)`.
            args: The payload, as for `JobType.enqueue`. Where it is a dict or a list, `Step.result` can stand for a value in it.
            after: Steps, or their names, after which it runs, at most 100; None: it starts at once.
            when: "finished": it runs when these have ended, however they ended. None and "succeeded": when they have succeeded.
            step: Name of the step; None: that of the job type, with a number when there is one already.
            kwargs: The payload by name, as for `JobType.enqueue`.

        Raises:
            InvalidInput: The payload does not fit the job type, a step is not one of this graph, or an argument is not valid.
        """
        return self._loop.call(lambda: self._of.add(job, *args, after=after, when=when, step=step, **kwargs))

    def add_many(
        self,
        job: JobType[Any] | JobCall[Any],
        payloads: Iterable[Any],
        *,
        after: StepReference | Sequence[StepReference] | None = None,
        when: When | None = None,
        step: str | None = None,
    ) -> Step:
        """Add a step of many jobs, up to 100,000. Steps after it run when all of them have ended.

        Args:
            job: Their job type, also with options of the jobs.
            payloads: The payload of each.
            after: See `add`.
            when: See `add`.
            step: See `add`.

        Raises:
            InvalidInput: As for `add`.
        """
        return self._loop.call(lambda: self._of.add_many(job, payloads, after=after, when=when, step=step))

    def start(self, *, id: str | None = None, connection: Any = None) -> UUID:
        """Start a run of the steps. To start it again with the same id, in any process, is the same run.

        Args:
            id: Id of the run, such as `nightly-2026-11-22`; None: a new one.
            connection: Connection of the caller, in whose transaction to start it; see `Penstock.enqueue`.

        Returns:
            The id of the run as a job group, which `Penstock.workflow_steps` and others take, as they take `id`.

        Raises:
            InvalidInput: The graph has no steps, or the database refuses one.
            Conflict: A job group, or a run of another workflow, has this id.
            NotFound: A job type does not exist.
        """
        return self._loop.run(self._of.start(id=id, connection=connection), connection=connection)

    @property
    def name(self) -> str:
        """See `Workflow`."""
        return self._of.name
