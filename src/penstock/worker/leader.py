"""Tasks of the leader: functions that one process of all runs, as long as it lives.

A task has a group of one slot; the workers that declare it are the members, and the owner of the slot runs it. The protocol is
that of pools (`penstock.groups`): a leader that is silent for `dead_after` is evicted, and stops its own task before that. A task
that raises an error starts again after a pause, in the same process.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

import orjson
from pydantic import ConfigDict

from penstock.core.blocking import run_without_loop
from penstock.core.checks import check_documentation, check_name
from penstock.core.dependencies import name_of
from penstock.core.logs import get_logger
from penstock.core.records import example
from penstock.core.transactional import fetch_document, in_callers_task
from penstock.core.user_code import contained, message_of
from penstock.errors import Conflict, InvalidInput, PenstockError
from penstock.groups.draining import DrainingTasks
from penstock.groups.membership import Membership
from penstock.postgres.context import Context
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notifications
from penstock.settings import Settings
from penstock.worker.sync import SyncLeaderTask

log = get_logger("penstock.leader")
_SHORTEST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_CHECK = "select penstock.check_leader({0}, cast({1} as jsonb))"


class Leader:
    """The leadership under which a task runs: what `@app.on_leader` functions get.

    Attributes:
        name: Name of the task.
        epoch: Number of this leadership, which grows with each change of the leader: a fencing token for other systems.
    """

    def __init__(self, name: str, epoch: int, member: Membership) -> None:
        self.name = name
        self.epoch = epoch
        self._member = member

    @property
    def leads(self) -> bool:
        """Whether this process still leads, by its own clock. The task is cancelled soon after this becomes False."""
        return self._member.owned.get(0) == self.epoch

    async def check(self, connection: Any) -> None:
        """Bind the caller's transaction to this leadership: no other process leads before the transaction has ended.

        Args:
            connection: Connection of the task with an open transaction: of asyncpg, psycopg, SQLAlchemy or Django.

        Raises:
            Conflict: Another process has taken over. Let the transaction roll back, and the error leave the task.
        """
        await _check_through(connection, self.name, self.fence)

    def check_blocking(self, connection: Any) -> None:
        """`check` for connections that block (psycopg, SQLAlchemy, Django)."""
        run_without_loop(self.check(connection))

    @property
    def fence(self) -> str:
        """The argument of `penstock.check_leader(name, fence)`, for programs that call it themselves."""
        return orjson.dumps({"member": self._member.id, "epoch": self.epoch}).decode()


@in_callers_task
async def _check_through(connection: Any, name: str, fence: str) -> None:
    await fetch_document(connection, _CHECK, name, fence)


@dataclass(frozen=True, slots=True)
class LeaderTask:
    """A declared task of the leader, callable like its function. `Penstock.on_leader` makes it.

    Attributes:
        name: Name of the task.
        function: Function of a `Leader`, or without arguments.
        docs_url: Address of its documentation, or None.
        owner: Who answers for it, or None.
        context: Open databases of its application; None: it belongs to none.
    """

    name: str
    function: Callable[..., Awaitable[None]]
    docs_url: str | None = None
    owner: str | None = None
    context: Context | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name("name of a task of the leader", self.name, 199)
        check_documentation(f"task {self.name}", self.docs_url, self.owner)
        if not inspect.iscoroutinefunction(self.function) or len(inspect.signature(self.function).parameters) > 1:
            raise InvalidInput(
                f"{name_of(self.function)} cannot be a task of the leader",
                hint="Declare it as: async def task(leader: Leader) -> None. Only async functions can be stopped.",
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.function(*args, **kwargs)

    async def declare(self) -> None:
        """Write the task into the database, where `penstock leaders` lists it.

        `Penstock.declare`, `penstock declare MODULE:APP` and each worker that may lead do so. Opening the application does not.
        """
        await _declare(await self._home.database(), self.name)

    @property
    def sync(self) -> SyncLeaderTask:
        """The blocking half, for threads without an event loop."""
        return SyncLeaderTask(self, self._home.background)

    @property
    def _home(self) -> Context:
        if self.context is None:
            raise InvalidInput(f"task {self.name} belongs to no application", hint="Declare it with app.on_leader.")
        return self.context


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The state of a task of the leader.

    Attributes:
        name: Name of the task.
        state: "waiting" (it has not begun under this leader), "running", "failed" (it starts again after a pause) or "ended".
        leader: Member that leads, or None; its id begins with the id of its worker.
        epoch: Number of the leadership.
        leads_since: Since when it leads, or None.
        candidates: Number of processes that could lead.
        failures: How often the task failed since it last returned.
        last_error: Its last error, or None.
        last_error_at: When it failed last, or None.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "name": "follow-prices", "state": "running", "leader": "web-1.4711.a1b2c3.l1", "epoch": 3,
        "leads_since": "2026-01-11T18:26:26Z", "candidates": 4, "failures": 0, "last_error": None, "last_error_at": None,
    })  # fmt: skip

    name: str
    state: str
    leader: str | None
    epoch: int
    leads_since: datetime | None
    candidates: int
    failures: int
    last_error: str | None
    last_error_at: datetime | None


async def _declare(database: Database, name: str) -> None:
    await database.fetch("select penstock.declare_leader_task($1)", name)


async def leaders(database: Database) -> list[LeaderRecord]:
    """The tasks of the leader, by name."""
    return [LeaderRecord(*tuple(row)) for row in await database.fetch("select * from penstock.leader_list()")]


class LeaderService:
    """A task of the leader in one worker: it takes part in the group, and runs the task while it owns the slot. A `SlotUser`.

    Args:
        database: Database of the task.
        task: Task to run.
        settings: Heartbeats, and the time that a cancelled task has to clean up (`handover_grace`).
        id: Id of the member.
    """

    def __init__(self, database: Database, task: LeaderTask, settings: Settings, id: str) -> None:
        self.name = task.name
        self._database = database
        self._task = task
        self._grace_s = settings.handover_grace.total_seconds()
        self.member = Membership(database, f"/{task.name}", id, self, settings)
        self._running: asyncio.Task[None] | None = None
        self._ending = DrainingTasks()

    def subscribe(self, notifications: Notifications) -> None:
        """Subscribe to the notifications about the slot."""
        notifications.wake(self.member.wake, Kind.SLOTS, Kind.CONNECTED, subject=f"/{self.name}")

    async def run(self) -> None:
        """Take part until `stop`."""
        await self._database.retrying(lambda: _declare(self._database, self.name))
        await self.member.run()

    def stop(self) -> None:
        """Cancel the task, release the slot and leave; `run` ends then."""
        self.member.stop()

    # -- see `SlotUser`

    def gained(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        leader = Leader(self.name, epoch, self.member)
        self._running = asyncio.create_task(self._lead(leader), name=f"penstock-leader-{self.name}")

    async def revoke(self, slot: int, epoch: int) -> bool:
        """See `SlotUser`: the task is cancelled, and has a while to clean up before another process begins."""
        if (running := self._cancel(slot)) is not None:
            await asyncio.wait([running], timeout=self._grace_s)
        return True

    def lost(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        self._cancel(slot)

    def draining(self, slot: int) -> bool:
        """See `SlotUser`."""
        return self._ending.holds(slot)

    def _cancel(self, slot: int) -> asyncio.Task[None] | None:
        running, self._running = self._running, None
        if running is not None:
            self._ending.add(running, slot, self._grace_s)
            running.cancel()
        return running

    async def _lead(self, leader: Leader) -> None:
        log.info("leader_began", task=self.name, member=self.member.id, epoch=leader.epoch)
        loop = asyncio.get_running_loop()
        pause = _SHORTEST_PAUSE_S
        while True:
            await self._note(leader, "running")
            began_at = loop.time()
            try:
                with contained():
                    await self._call(leader)
            except Exception as error:
                log.exception("leader_task_failed", task=self.name)
                await self._note(leader, "failed", {"type": type(error).__qualname__, "message": message_of(error)})
            else:
                await self._note(leader, "ended")
                return
            # What ran for long begins again soon.
            pause = _SHORTEST_PAUSE_S if loop.time() - began_at > _LONGEST_PAUSE_S else min(pause * 2, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))

    async def _call(self, leader: Leader) -> None:
        function = self._task.function
        await (function(leader) if inspect.signature(function).parameters else function())

    async def _note(self, leader: Leader, state: str, error: dict[str, str] | None = None) -> None:
        query = "select penstock.note_leader($1, $2::jsonb, $3, $4::jsonb)"
        failed = None if error is None else orjson.dumps(error).decode()
        try:
            await self._database.fetch(query, self.name, leader.fence, state, failed)
        except Conflict:
            # Another process leads, which the membership is about to learn.
            log.info("leader_lost", task=self.name, epoch=leader.epoch)
        except PenstockError as refused:
            with suppress(Exception):
                log.warning("leader_note_failed", task=self.name, error=refused)
