"""Job groups: any number of jobs, and one that runs when all of them have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from penstock.core.checks import check_choice, check_text
from penstock.core.serialization import Codec
from penstock.errors import InvalidInput
from penstock.jobs.job_type import JobType
from penstock.jobs.models import GroupReference, group_id
from penstock.postgres.context import Context
from penstock.workflows import queries
from penstock.workflows.models import JobGroupRecord, OnFailure
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
    cancelled. A process that opens the group by its name again, for example after a crash, continues it.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        then: Then | None,
        then_data: Any,
        on_failure: OnFailure,
        parent: GroupReference | None,
    ) -> None:
        check_text("name of a job group", name)
        check_choice("on_failure", on_failure, ["cancel", "continue"])
        if then is not None and not isinstance(then, (JobType, str)):
            raise InvalidInput(f"then must be a job type, not {then!r:.100}", hint="Give a declared job type, or its name.")
        self.name = name
        """Name of the group."""
        self._context = context
        self._then = then
        self._then_data = then_data
        self._on_failure = on_failure
        self._parent = parent
        self._id: UUID | None = None

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
        data = "{}"
        if isinstance(self._then, JobType):
            await self._then.declare_if_allowed()
            data = self._then.codec.dump(self._then.codec.or_empty(self._then_data))
        elif self._then is not None:
            data = Codec(Any, self._then).dump({} if self._then_data is None else self._then_data)
        parent = None if self._parent is None else group_id(self._parent, "parent")
        self._id = await queries.open_group(
            await self._context.database(),
            self.name,
            self._then.name if isinstance(self._then, JobType) else self._then,
            data,
            self._on_failure,
            parent,
        )
        return self

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
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            await self.seal()
        else:
            await self.cancel()
