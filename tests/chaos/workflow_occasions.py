"""Arranged situations of workflows, in each of which a guarantee decides: without it the promise is broken on every run.

Jobs hold a worker at a gate, a file, until the situation is there. The ids of ticks say when a resolver has come by: what it puts
back has a higher id than what it found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

from penstock import Penstock
from penstock.jobs.models import NewJob, make_id
from tests.checker.workflows import Planned
from tests.waiting import eventually

WORK: dict[str, Any] = {"does": "work"}


async def waiting_jobs(app: Penstock, url: str, gates: Path) -> list[Planned]:
    """Enqueue jobs behind running, ended, failed and locked ones. Returns what was acknowledged."""
    planned: list[Planned] = []

    async def enqueue(*jobs: tuple[UUID, dict[str, Any], Sequence[UUID]]) -> None:
        new = [NewJob(data, id=id, after=tuple(after) or None) for id, data, after in jobs]
        await app.enqueue_many("plain", new)
        planned.extend(Planned(str(id), tuple(map(str, after))) for id, _, after in jobs)

    async def held() -> tuple[UUID, Path]:
        """A job that runs until its gate, a file, is there."""
        id = make_id()
        gate = gates / str(id)
        await enqueue((id, {"does": "hold", "gate": str(gate)}, ()))
        running = "select status = 'in-progress' from penstock.queued_jobs where id = $1"
        await eventually(lambda: database.fetchval(running, id), "the job at the gate")
        return id, gate

    async def linked(id: UUID) -> None:
        """Wait until the jobs for which a job waits are marked, so that their ends write ticks."""
        all_are = "select bool_and(linked) from penstock.job_dependencies where job = $1"
        await eventually(lambda: database.fetchval(all_are, id), "the links to the running jobs")

    database = await app.database()
    # A job behind one that runs.
    first, gate = await held()
    await enqueue((make_id(), WORK, [first]))
    gate.touch()
    await handled(app, [first])
    # A job behind one that has ended.
    await enqueue((make_id(), WORK, [first]))
    # Jobs behind one that fails.
    failing, cancelled = make_id(), make_id()
    await enqueue((failing, {"does": "fail"}, ()), (cancelled, WORK, [failing]), (make_id(), WORK, [cancelled]))
    # A job behind two that run, one of which ends.
    (one, gate), (other, other_gate) = await held(), await held()
    behind = make_id()
    await enqueue((behind, WORK, [one, other]))
    await linked(behind)
    gate.touch()
    await handled(app, [one])
    if await database.fetchval("select count(*) = 0 from penstock.waiting_jobs where id = $1", behind):
        await archived(app, [behind])
    other_gate.touch()
    # A job that a client has locked when the job in front of it ends.
    first, gate = await held()
    locked = make_id()
    await enqueue((locked, WORK, [first]))
    await linked(locked)
    client = await asyncpg.connect(url)
    try:
        transaction = client.transaction()
        await transaction.start()
        await client.execute("select penstock.cancel($1)", locked)
        gate.touch()
        # Without the lock that skips, a resolver waits for the client.
        waits = "select exists (select from pg_stat_activity where $1 = any (pg_blocking_pids(pid)))"
        await handled(app, [first], unless=lambda: database.fetchval(waits, client.get_server_pid()))
        await transaction.rollback()
    finally:
        await client.close()
    # An id that has ended, again: with `after` and without.
    await app.enqueue_many("plain", [NewJob(WORK, id=first)])
    await app.enqueue_many("plain", [NewJob(WORK, id=first, after=one)])
    # One id in two open transactions, with `after` and without.
    twin, (before, gate) = make_id(), await held()
    clients = [await asyncpg.connect(url) for _ in range(2)]
    try:
        first_of_both = clients[0].transaction()
        await first_of_both.start()
        await app.enqueue("plain", WORK, id=twin, after=before, connection=clients[0])
        call = asyncio.ensure_future(app.enqueue("plain", WORK, id=twin, connection=clients[1]))
        blocked = "select cardinality(pg_blocking_pids($1)) > 0"

        async def waits() -> bool:
            return call.done() or bool(await database.fetchval(blocked, clients[1].get_server_pid()))

        await eventually(waits, "the second enqueue of an id")
        await first_of_both.commit()
        await call
        planned.append(Planned(str(twin), (str(before),)))
        gate.touch()
    finally:
        for client in clients:
            await client.close()
    # Two ends for which one job waits, in two passes at the same time.
    (one, gate), (other, other_gate) = await held(), await held()
    behind = make_id()
    await enqueue((behind, WORK, [one, other]))
    await linked(behind)
    resolvers = [await asyncpg.connect(url) for _ in range(2)]
    resolve = "select penstock.resolve_workflows()"
    try:
        transaction = resolvers[0].transaction()
        await transaction.start()

        async def has_the_lock() -> bool:
            return await resolvers[0].fetchval(resolve) is not None

        # A tick, without which a pass ends before it takes the lock.
        await resolvers[0].execute("insert into penstock.workflow_ticks (jobs, statuses) values ('{}', '{}')")
        await eventually(has_the_lock, "the lock of the resolver")
        gate.touch()
        await archived(app, [one])
        while await resolvers[0].fetchval(resolve):
            pass
        other_gate.touch()
        await archived(app, [other])
        while await resolvers[1].fetchval(resolve):
            pass
        await transaction.commit()
    finally:
        for resolver in resolvers:
            await resolver.close()
    return planned


async def job_group(app: Penstock, url: str) -> tuple[UUID, list[str]]:
    """Add children to a group that has none left, before its seal, and in a transaction that is open when it is sealed.

    Returns the group and its children.
    """
    database = await app.database()
    group = await app.job_group("arranged", then="plain", then_data=WORK, on_failure="continue").open()

    async def nothing_is_left(ids: list[UUID]) -> None:
        """Wait until a resolver has met the group without a child that is left; and for what follows if that ends it."""
        await handled(app, ids, group.id)

        async def resolved() -> bool:
            return await database.fetchval("select penstock.resolve_workflows()") is not None

        await eventually(resolved, "a resolver")
        then = "select then_job from penstock.job_groups where id = $1 and finished_at is not null"
        if (ended := await database.fetchval(then, group.id)) is not None:
            await archived(app, [ended])

    def new(ids: list[UUID]) -> list[NewJob[Any]]:
        return [NewJob(WORK, id=id, group=group.id) for id in ids]

    early, late, last = ([make_id() for _ in range(3)] for _ in range(3))
    await app.enqueue_many("plain", new(early))
    await nothing_is_left(early)
    # Again, when they have ended.
    await app.enqueue_many("plain", new(early))
    await app.enqueue_many("plain", new(late))
    client = await asyncpg.connect(url)
    try:
        async with client.transaction():
            await app.enqueue_many("plain", new(last), connection=client)
            await group.seal()
            await nothing_is_left([*early, *late])
    finally:
        await client.close()
    return group.id, list(map(str, [*early, *late, *last]))


async def archived(app: Penstock, ids: Sequence[UUID]) -> None:
    """Wait until these jobs have ended."""
    database = await app.database()
    ended = "select count(distinct id) = cardinality($1::uuid[]) from penstock.archived_jobs where id = any ($1)"
    await eventually(lambda: database.fetchval(ended, list(ids)), "the end of the jobs")


async def handled(
    app: Penstock, ids: Sequence[UUID], group: UUID | None = None, unless: Callable[[], Awaitable[bool]] | None = None
) -> None:
    """Wait until these jobs have ended, and a resolver has come by their ends, or `unless` is true."""
    database = await app.database()
    await archived(app, ids)
    # The ticks of their ends are visible with their rows in the archive, unless they are handled.
    newest = await database.fetchval("select coalesce(max(id), 0) from penstock.workflow_ticks")
    none_left = "select count(*) = 0 from penstock.workflow_ticks where id <= $1 and (workflow = $2 or jobs && $3::uuid[])"

    async def came() -> bool:
        return await database.fetchval(none_left, newest, group, list(ids)) or (unless is not None and await unless())

    await eventually(came, "a resolver")
