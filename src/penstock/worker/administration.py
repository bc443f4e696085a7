"""Tasks of the leader, and what people and programs do with workers and fleets by their names: a part of `Penstock`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, overload

from penstock.core.checks import check_text, refusing_unknown
from penstock.errors import InvalidInput
from penstock.postgres.context import Context, Declarations
from penstock.worker import fleets
from penstock.worker.doctor import examine
from penstock.worker.findings import Finding
from penstock.worker.fleets import FleetRecord, WorkerRecord
from penstock.worker.leader import LeaderRecord, LeaderTask, leaders
from penstock.worker.overview import Overview, look, reading


class WorkerAdministration(Declarations):
    """Declares tasks of the leader; lists and drains workers and fleets."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.leader_tasks: dict[str, LeaderTask] = {}

    @overload
    def on_leader(self, function: Callable[..., Awaitable[None]], /) -> LeaderTask: ...
    @overload
    def on_leader(
        self, function: None = None, /, *, name: str | None = None, docs_url: str | None = None, owner: str | None = None
    ) -> Callable[[Callable[..., Awaitable[None]]], LeaderTask]: ...
    @refusing_unknown("a task of the leader")
    def on_leader(
        self,
        function: Callable[..., Awaitable[None]] | None = None,
        /,
        *,
        name: str | None = None,
        docs_url: str | None = None,
        owner: str | None = None,
    ) -> Any:
        """Declare a task that one worker of all runs, as long as it lives: `@app.on_leader`.

            @app.on_leader
            async def follow_prices(leader: Leader) -> None:
                while True:
                    await asyncio.sleep(1)

        When the leader dies or is suspended, another worker takes over within `Settings.dead_after` and a half (15 s by default);
        when it stops, at once. The task of a suspended leader that continues is cancelled, and `leader.check(connection)` refuses
        what it was about to write. A task that raises an error starts again after a pause that grows from 1 s to a minute. A task
        that returns has ended until another worker leads.

        Args:
            function: Async function of a `Leader`, or without arguments.
            name: Name of the task; None: the function's name with dashes.
            docs_url: Address of its documentation, for people: `https://...`.
            owner: Who answers for it: a team, an address.

        Raises:
            InvalidInput: The function cannot be a task, or the name is declared already.
        """

        def declare(function: Callable[..., Awaitable[None]]) -> LeaderTask:
            named = name or getattr(function, "__name__", "").replace("_", "-")
            task = LeaderTask(named, function, docs_url, owner, self.context)
            if task.name in self.leader_tasks:
                raise InvalidInput(f"task {task.name} is declared twice", hint="Give each a name of its own.")
            self.leader_tasks[task.name] = task
            return task

        return declare if function is None else declare(function)

    async def leaders(self) -> list[LeaderRecord]:
        """The tasks of the leader in the database, by name: which worker leads, since when, and what became of the task."""
        return await leaders(await self.context.database())

    async def workers(self) -> list[WorkerRecord]:
        """All workers: where they run, what they work on, and whether they live."""
        return await fleets.workers(await self.context.database())

    async def overview(self) -> Overview:
        """How everything is doing: what is wrong first, then how much waits, runs and finishes. `penstock top` shows it.

        It counts no whole queue, and costs the database some tens of milliseconds, whatever the size of the queue.
        """
        return await look(reading(await self.context.database()))

    async def drain_worker(self, id: str) -> str:
        """Let one worker of a fleet finish what it runs, and end.

        Args:
            id: Id of the worker, as `workers` lists it.

        Returns:
            The name of its fleet.

        Raises:
            NotFound: There is no such worker.
            Conflict: It is of no fleet: its process ends in an orderly way by SIGTERM.
        """
        check_text("id", id)
        return await fleets.drain_worker(await self.context.database(), id)

    async def doctor(self) -> list[Finding]:
        """What is wrong with the database and the workers, and what to do about it: what `penstock doctor` shows.

        A database that does not answer, and a schema that does not fit, are findings. The application need not be open.
        """
        async with self.context.unchecked() as database:
            return await examine(database)

    async def fleets(self) -> list[FleetRecord]:
        """All fleets of workers on Spark, and how many of their workers are present."""
        return await fleets.fleets(await self.context.database())

    async def drain_fleet(self, name: str) -> None:
        """Let the workers of a fleet finish what they run, and end.

        Args:
            name: Name of the fleet.

        Raises:
            NotFound: There is no such fleet.
        """
        check_text("name", name)
        await fleets.drain(await self.context.database(), name)
