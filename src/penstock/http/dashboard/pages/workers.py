"""The workers: processes and their hosts, what runs on each right now, and fleets."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from penstock.http.dashboard.view import Action, Done, Page, Shown, View, not_here
from penstock.http.workers.access import is_open_to, is_theirs, shown_to
from penstock.postgres.database import Database
from penstock.worker import fleets

_MOST_LEASES = 1_000


@dataclass(frozen=True, slots=True)
class _Lease:
    """A batch of jobs that a worker holds."""

    worker: str
    name: str
    jobs: int
    since: datetime


async def show(view: View) -> Shown:
    """The workers that the user may see, and what they hold."""
    user = view.user
    workers = [shown_to(user, worker) for worker in await view.read(fleets.workers) if is_open_to(user, worker)]
    leases = await view.read(_leases, kept_s=2.0, follows=True)
    held: dict[str, list[_Lease]] = {}
    for lease in leases:
        if user.may(lease.name):
            held.setdefault(lease.worker, []).append(lease)
    all_fleets = await view.read(fleets.fleets) if user.types is None else []
    order = sorted(workers, key=lambda worker: (not worker.alive, worker.host, worker.id))
    return Shown("Workers", "workers.html", {"workers": order, "held": held, "fleets": all_fleets})


async def drain(view: View) -> Done:
    """Let one worker of a fleet finish what it runs, and end."""
    id = view.parameters["id"]
    database = await view.database()
    if not await is_theirs(database, view.user, id):
        raise not_here(f"worker {id}")
    async with view.changing("drain worker", worker=id):
        fleet = await fleets.drain_worker(database, id)
    return Done("workers", f"The worker finishes what it runs, and leaves the fleet {fleet}.")


async def drain_fleet(view: View) -> Done:
    """Let the workers of a fleet finish what they run, and end."""
    name = view.parameters["name"]
    async with view.changing("drain fleet", fleet=name):
        await fleets.drain(await view.database(), name)
    return Done("workers", f"The workers of the fleet {name} finish what they run, and end.")


async def _leases(database: Database) -> list[_Lease]:
    """The leases, oldest first; there are as many as workers can hold."""
    rows = await database.fetch(
        "select worker, name, open_jobs, started_at from penstock.leases order by expires_at limit $1", _MOST_LEASES
    )
    return [_Lease(*tuple(row)) for row in rows]


PAGES = [Page("workers", show)]
ACTIONS = [Action("workers/{id}/drain", drain), Action("fleets/{name}/drain", drain_fleet, all_types=True)]
