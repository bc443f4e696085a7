"""Operations of an application on workflows: a part of `Penstock`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from penstock.core.checks import check_number, check_span, check_text
from penstock.core.encryption import Keyring, owned_by
from penstock.core.serialization import dump_json
from penstock.jobs import opening, type_queries
from penstock.jobs import queries as jobs
from penstock.jobs.declarations import JobDeclarations
from penstock.jobs.group_record import JobGroupRecord
from penstock.jobs.models import GroupReference
from penstock.jobs.queries import load_or_text
from penstock.jobs.records import parse_id
from penstock.jobs.steps import StepRecord
from penstock.workflows import queries
from penstock.workflows.graph import Workflow
from penstock.workflows.job_group import JobGroup, Then
from penstock.workflows.models import OnFailure, WorkflowRunRecord, WorkflowStepRecord
from penstock.workflows.transactional import encrypted_type_through, signal_through


class WorkflowAdministration(JobDeclarations):
    """Opens, lists and cancels job groups, and runs of workflows; signals jobs, and shows their durable steps."""

    def job_group(
        self,
        name: str,
        *,
        then: Then | None = None,
        then_data: Any = None,
        then_key: str | None = None,
        on_failure: OnFailure = "cancel",
        parent: GroupReference | None = None,
    ) -> JobGroup:
        """A job group: children of any number, which start at once, and a job that runs once when all of them have ended.

        Use it as a block: `async with app.job_group("import-7", then=report) as group`, and enqueue children with the option
        `group=group`. The block seals the group at its end. When it raises, it cancels the group; in the handler of a job it does
        not: a further attempt goes on with the group, and the end of the job cancels it when no attempt has sealed it. Children
        without an id that the handler enqueues into it again are those of the attempt before.

        Args:
            name: Name of the group, such as `import-2026-11-22`: to open it again, in any process, is the same group.
            then: Job type, or its name, of the job that runs when the group has ended; None: none.
            then_data: Payload of this job; None: an empty object, unless the type of the payload has None.
            then_key: Key of this job; None: the one that the rule of its type gives the payload, when it has one.
            on_failure: "cancel": the first child that fails or expires cancels the others, and `then` with them; "continue": the
                others go on, and `then` runs however they end.
            parent: Group of which this one is a child, which ends after this one; None: none.

        Raises:
            InvalidInput: An argument is not valid.
        """
        declared = self.types.get(then, then) if isinstance(then, str) else then
        return JobGroup(self.context, name, declared, then_data, then_key, on_failure, parent)

    async def job_groups(self, *, open: bool = False, limit: int = 50) -> list[JobGroupRecord]:
        """Job groups, latest first.

        Args:
            open: Whether only those that have not ended.
            limit: Maximum number, at most 1,000.
        """
        check_number("limit", limit, 1, 1_000)
        return await queries.groups(await self.context.database(), limit, open=open)

    async def find_group(self, group: UUID | str) -> JobGroupRecord:
        """A job group by its id or its name. Raises `NotFound`.

        Args:
            group: Id of the group, a UUID; or its name.
        """
        return await queries.find_group(await self.context.database(), group)

    async def cancel_group(self, group: UUID | str) -> JobGroupRecord:
        """Cancel the children of a job group, and its `then`. Raises `NotFound`.

        Args:
            group: Id of the group, a UUID; or its name.

        Returns:
            The group. It ends when its children have ended.
        """
        database = await self.context.database()
        await queries.cancel_group(database, (await queries.find_group(database, group)).id)
        return await queries.find_group(database, group)

    async def signal(self, id: UUID | str, name: str, value: Any = None, *, connection: Any = None) -> bool:
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
        check_text("name of a signal", name)
        job, text = parse_id(id), dump_json(value, f"the signal {name}")
        if self.context.keyring:
            text = await self._sealed_signal(job, name, text, connection)
        if connection is not None:
            return await signal_through(connection, job, name, text)
        return await queries.signal(await self.context.database(), job, name, text)

    async def _sealed_signal(self, job: UUID, name: str, text: str, connection: Any) -> str:
        """A signal as it is stored: encrypted when the type of the job is, which the caller's transaction may have enqueued."""
        if connection is not None:
            type = await encrypted_type_through(connection, job)
        else:
            type = await self._encrypted_type(job)
        return text if type is None else self.context.keyring.seal(text, owned_by("signal", type, str(job), name))

    async def _encrypted_type(self, job: UUID) -> str | None:
        """The type of a job when it is encrypted."""
        database = await self.context.database()
        if (found := (await jobs.find(database, [job])).get(job)) is None:
            return None
        return next((type.name for type in await type_queries.job_types(database, [found.name]) if type.encrypted), None)

    async def steps(self, id: UUID | str, *, after: str | None = None, limit: int = 1_000) -> list[StepRecord]:
        """The durable steps of a job, in their order, and the signals for which it does not wait yet.

        A step has up to 256 KiB: ask for fewer at once where results are large.

        Args:
            id: Id of the job; one that is not known has no steps.
            after: Cursor of the last step of the page before.
            limit: Maximum number of steps, at most 1,000.
        """
        if after is not None:
            check_text("after", after)
        check_number("limit", limit, 1, 1_000)
        database, job = await self.context.database(), parse_id(id)
        steps = await queries.steps_shown(database, job, after=after, limit=limit)
        found = (await jobs.find(database, [job])).get(job) if steps else None
        return [_opened(step, self.context.keyring, "" if found is None else found.name, job) for step in steps]

    async def group_of(self, job: UUID | str) -> JobGroupRecord | None:
        """The job group of a job, with the numbers of its children. A child that runs can add children: `options(group=...)`.

        Args:
            job: Id of the job, which may run or have ended.

        Returns:
            Of the `then` of a group that group, of a child the group in which it is, as an enqueue takes it; None: the job is in
            no group, or its group was pruned.
        """
        return await queries.group_of(await self.context.database(), parse_id(job))

    def workflow(self, name: str, *, on_failure: OnFailure = "continue") -> Workflow:
        """A graph of steps, which are added one by one, and then started together as a run.

        Args:
            name: Name of the workflow, such as `nightly`; its runs have ids of their own.
            on_failure: "continue": when a step fails, the steps that need it are cancelled, and the others go on; "cancel": the
                first step that fails cancels all others.

        Raises:
            InvalidInput: An argument is not valid.
        """
        return Workflow(self.context, name, on_failure)

    async def workflow_runs(self, workflow: str | None = None, *, open: bool = False, limit: int = 50) -> list[WorkflowRunRecord]:
        """Runs of workflows, latest first.

        Args:
            workflow: Name of the workflow; None: all.
            open: Whether only those that have not ended.
            limit: Maximum number, at most 1,000.
        """
        if workflow is not None:
            check_text("workflow", workflow)
        check_number("limit", limit, 1, 1_000)
        return await queries.workflow_runs(await self.context.database(), workflow, limit, open=open)

    async def find_workflow_run(self, run: UUID | str) -> WorkflowRunRecord:
        """A run of a workflow. Raises `NotFound`.

        Args:
            run: What `Workflow.start` returned, or the id that it was given.
        """
        return await queries.find_workflow_run(await self.context.database(), run)

    async def workflow_steps(self, run: UUID | str) -> list[WorkflowStepRecord]:
        """The steps of a run, each behind those after which it runs, with status and times. Raises `NotFound`.

        Args:
            run: See `find_workflow_run`.
        """
        database = await self.context.database()
        return await queries.workflow_steps(database, (await queries.find_workflow_run(database, run)).id)

    async def cancel_workflow(self, run: UUID | str) -> WorkflowRunRecord:
        """Cancel a run: its steps that wait, are queued or run, and the jobs of its groups. Raises `NotFound`.

        Args:
            run: See `find_workflow_run`.

        Returns:
            The run. It ends when its steps have ended; one that has ended stays as it is.
        """
        database = await self.context.database()
        found = await queries.find_workflow_run(database, run)
        await queries.cancel_group(database, found.id)
        return await queries.find_workflow_run(database, found.id)

    async def retry_workflow(self, run: UUID | str, *, from_step: str | None = None, id: str | None = None) -> WorkflowRunRecord:
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
        for what, text in (("from_step", from_step), ("id", id)):
            if text is not None:
                check_text(what, text)
        database = await self.context.database()
        found = await queries.find_workflow_run(database, run)
        return await queries.find_workflow_run(database, await queries.retry_workflow(database, found.id, from_step, id))

    async def wait_for_workflow(self, run: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> WorkflowRunRecord:
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
        check_span("timeout", timeout, zero=True)
        pause = 0.01
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while (found := await self.find_workflow_run(run)).finished_at is None:
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, 1.0)
        except TimeoutError:
            raise TimeoutError(f"run {run} has not ended within {timeout}: `penstock workflows show {run}` says why") from None
        return found


def _opened(step: StepRecord, keyring: Keyring, type: str, job: UUID) -> StepRecord:
    """A step as a program reads it."""
    kind = "signal" if step.kind in ("wait", "signal") else "step"
    owner = owned_by(kind, type, str(job), step.name)
    return replace(step, result=opening.open_value(load_or_text(step.result), keyring, owner))
