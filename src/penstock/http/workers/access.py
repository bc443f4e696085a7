"""What a user of some job types may see of a worker, and whether a worker is theirs.

A worker runs whatever its application declares, so that one process may work for users who may not know of each other.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from penstock.http.auth import Principal
from penstock.jobs import http_queries
from penstock.postgres.database import Database
from penstock.worker.fleets import WorkerRecord


async def is_theirs(database: Database, user: Principal, id: str) -> bool | None:
    """Whether all that a worker works on is open to a user; None: there is no such worker."""
    work = await http_queries.work_of(database, id)
    if work is None or user.types is None:
        return None if work is None else True
    # A worker that named nothing may work on anything, and the tasks of the leader are of no type.
    names = {*work.names, *work.pools, *work.schedules, *map(stream_of, work.consumers)}
    return bool(names) and not work.leader_tasks and user.types.issuperset(names)


async def claiming_as(database: Database, user: Principal, worker: str) -> str:
    """The name under which a user of some job types claims for a worker.

    The id of a worker that works for others would let their worker answer for these jobs, and would tell by what becomes of them
    whether it lives. In its place stands a name of the user's own, whose jobs are the user's until their leases end.
    """
    if user.types is None or await is_theirs(database, user, worker) is not False:
        return worker
    return f"user.{hashlib.blake2b(f'{user.name} {worker}'.encode(), digest_size=16).hexdigest()}"


def is_open_to(user: Principal, worker: WorkerRecord) -> bool:
    """Whether a user may see that there is this worker: of some types only when it works on none but these.

    A worker that named no types may work on any.
    """
    names = {*worker.names, *worker.pools}
    return user.types is None or (bool(names) and user.types.issuperset(names))


def shown_to(user: Principal, worker: WorkerRecord) -> WorkerRecord:
    """A worker without what it does for others."""
    if user.types is None:
        return worker
    blocked_by = worker.blocked_by
    return replace(
        worker,
        names=_open(user, worker.names),
        pools=_open(user, worker.pools),
        topics=_open(user, worker.topics),
        consumers=[consumer for consumer in worker.consumers if user.may(stream_of(consumer))],
        schedules=_open(user, worker.schedules),
        leader_tasks=[],
        blocked_by=blocked_by if blocked_by is not None and user.may(blocked_by.partition(" ")[0]) else None,
        halted={consumer: error for consumer, error in worker.halted.items() if user.may(stream_of(consumer))},
        no_key={name: key for name, key in worker.no_key.items() if user.may(name)},
    )


def stream_of(consumer: str) -> str:
    """The stream of a consumer, which is called stream/group."""
    return consumer.partition("/")[0]


def _open(user: Principal, names: list[str]) -> list[str]:
    return [name for name in names if user.may(name)]
