"""Job groups: any number of jobs, and one that runs when all of them have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from penstock.core.checks import check_choice, check_text
from penstock.core.serialization import Codec
from penstock.errors import InvalidInput
from penstock.jobs.filling import Filling
from penstock.jobs.group_record import JobGroupRecord
from penstock.jobs.handler import Job, running_job
from penstock.jobs.job_type import JobType
from penstock.jobs.models import GroupReference, group_id
from penstock.postgres.context import Context
from penstock.workflows import queries
from penstock.workflows.models import OnFailure
from penstock.workflows.sync import SyncJobGroup

if TYPE_CHECKING:
    from types import TracebackType

Then = JobType[Any] | str


class JobGroup:
    """A job group, which `Penstock.job_group` makes.

        @app.job("load-part")
        async def load_part(part: int) -> None: ...

        async with app.job_group("import-2026-11-22") as group:
            await load_part.options(group=group).enqueue(1)

    The block opens it, and seals it at its end: `then` runs when all children have ended. When the block raises, the group is
    cancelled; in the handler of a job it is not, and the next attempt of the job goes on with it. A process that opens the group
    by its name again, for example after a crash, continues it.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        then: Then | None,
        then_data: Any,
        then_key: str | None,
        on_failure: OnFailure,
        parent: GroupReference | None,
    ) -> None:
        check_text("name of a job group", name)
        check_choice("on_failure", on_failure, ["cancel", "continue"])
        if then is not None and not isinstance(then, (JobType, str)):
            raise InvalidInput(f"then must be a job type, not {then!r:.100}", hint="Give a declared job type, or its name.")
        if then_key is not None:
            check_text("then_key", then_key)
            if then is None:
                raise InvalidInput("then_key is given without then", hint="Give the job type of the job that has this key.")
        self.name = name
        """Name of the group."""
        self._context = context
        self._then = then
        self._then_data = then_data
        self._then_key = then_key
        self._on_failure = on_failure
        self._parent = parent
        self._id: UUID | None = None
        # The job whose handler fills it, and its lease: the end of this job decides what becomes of the group.
        self._filler: tuple[UUID, int] | None = None

    @property
    def id(self) -> UUID:
        """Id of the group. Raises `InvalidInput` before it was opened."""
        if self._id is None:
            raise InvalidInput(f"job group {self.name} is not open", hint="Open it: async with app.job_group(...) as group.")
        return self._id

    @property
    def sync(self) -> SyncJobGroup:
        """The blocking half, for threads without an event loop."""
        return SyncJobGroup(self, self._context.background)

    async def open(self) -> Self:
        """Open the group, or find the one of this name. The block of `async with` does it.

        Raises:
            Conflict: It was opened with other options.
            NotFound: The job type of `then` does not exist.
        """
        self._id = await queries.open_group(await self._context.database(), await self._new())
        return self

    async def _new(self) -> queries.NewGroup:
        """What opens it. Declares the type of `then`."""
        name = self._then.name if isinstance(self._then, JobType) else self._then
        data, key = "{}", self._then_key
        if isinstance(self._then, JobType):
            await self._then.declare_if_allowed()
            given = self._then.codec.or_empty(self._then_data)
            data = self._then.codec.dump(given)
            if key is None and self._then.key_of is not None:
                key = self._then.key_of(given)
        elif self._then is not None:
            data = Codec(Any, self._then).dump({} if self._then_data is None else self._then_data)
        parent = None if self._parent is None else group_id(self._parent, "parent")
        return queries.NewGroup(self.name, name, data, self._on_failure, parent, key)

    async def _fill(self, job: Job[Any], lease: int) -> None:
        """Open it for the handler of a job that runs here."""
        database = await self._context.database()
        self._id, seed = await queries.fill_group(database, await self._new(), job.id, lease)
        self._filler = None
        if seed is not None:
            self._filler = job.id, lease
            job.filling = job.filling or Filling()
            job.filling.begin(self._id, seed)

    async def seal(self) -> None:
        """Say that no more children come, apart from those that children of the group enqueue."""
        await queries.seal_group(await self._context.database(), self.id)

    async def cancel(self) -> None:
        """Cancel its children, the groups in it, and its `then`. A group that has ended stays as it is."""
        await queries.cancel_group(await self._context.database(), self.id)

    async def find(self) -> JobGroupRecord:
        """How many children it has, and how they ended so far."""
        return await queries.find_group(await self._context.database(), self.id)

    async def __aenter__(self) -> Self:
        job = running_job()
        if job is None or job.lease is None:
            return await self.open()
        await self._fill(job, job.lease)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._filler is not None:
            if kind is None:
                await queries.seal_filled_group(await self._context.database(), self.id, *self._filler)
        elif kind is None:
            await self.seal()
        else:
            await self.cancel()
