"""The job groups: how many of their children have ended and how, what waits for them, and cancelling them.

A run of a workflow is a job group whose page shows its steps too, as a graph and as a table (`run_page.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from penstock.errors import NotFound
from penstock.http.auth import Role
from penstock.http.dashboard import queries
from penstock.http.dashboard.pages.jobs import line_of
from penstock.http.dashboard.queries import JobSearch, Named
from penstock.http.dashboard.run_page import Run, read_run, shown_run
from penstock.http.dashboard.view import Action, Done, Page, Shown, Sight, View, not_here, segment
from penstock.jobs import http_queries
from penstock.jobs.group_record import JobGroupRecord
from penstock.jobs.http_queries import StoredJob
from penstock.postgres.database import Database
from penstock.workflows import queries as workflows

_SHOWN = 100
_CHILDREN = 20
_HOW = ("succeeded", "failed", "cancelled", "expired")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job group is.

    Attributes:
        group: The group.
        left: Number of its children that have not ended.
        counts: How its children ended, with their numbers; without what no child did.
    """

    group: JobGroupRecord
    left: int
    counts: list[tuple[str, int]]

    @classmethod
    def of(cls, group: JobGroupRecord) -> Progress:
        """The progress of a group."""
        counts = [(how, number) for how in _HOW if (number := getattr(group, how))]
        return cls(group, max(group.added - group.ended, 0), counts)


@dataclass(frozen=True, slots=True)
class _Group:
    record: JobGroupRecord
    parent: JobGroupRecord | None
    inner: list[Named]
    run: Run | None


async def show(view: View) -> Shown:
    """The job groups, latest first."""
    open = view.query.get("open") == "yes"
    groups = await view.read(_groups, open, kept_s=2.0, follows=True)
    return Shown(
        "Workflows", "workflows.html", {"groups": [Progress.of(group) for group in groups], "open": open, "most": _SHOWN}
    )


async def show_one(view: View) -> Shown:
    """One job group: its children by status, the newest that did not succeed, and those that wait or run."""
    read = await _read(view)
    group = read.record
    unfinished = await _children(view, group.id, finished=False)
    # The children that did not succeed have an index of their own.
    bad = [await _children(view, group.id, finished=True, status=how) for how in ("failed", "expired") if getattr(group, how)]
    return Shown(
        group.name,
        "workflow.html",
        {
            "progress": Progress.of(group), "group": group, "parent": read.parent, "inner": read.inner,
            "unfinished": unfinished, "bad": bad, "shown_run": None if read.run is None else shown_run(view, read.run),
        },
    )  # fmt: skip


async def cancel(view: View) -> Done:
    """Cancel the children of a group, and its `then`."""
    group = (await _read(view)).record
    async with view.changing("cancel job group", id=str(group.id), name=group.name):
        await workflows.cancel_group(await view.database(), group.id)
    return Done(f"workflows/{segment(group.id)}", "Its children are being cancelled, and so is what runs after them.")


async def retry(view: View) -> Done:
    """Retry a run that has ended: what did not succeed, or from a step on."""
    group = (await _read(view)).record
    from_step = view.raw_text("from_step") or None
    async with view.changing("retry workflow", id=str(group.id), name=group.name, from_step=from_step):
        new = await workflows.retry_workflow(await view.database(), group.id, from_step, None)
    return Done(f"workflows/{segment(new)}", "This is the new run, which shares the results of the steps that are not run again.")


async def _groups(database: Database, open: bool) -> list[JobGroupRecord]:
    return await workflows.groups(database, _SHOWN, open=open)


async def _read(view: View) -> _Group:
    wanted = view.parameters["id"]
    read = await view.read(_look, wanted, kept_s=1.0, follows=True)
    if read is None:
        raise not_here(f"job group {wanted}")
    return read


async def _look(database: Database, wanted: str) -> _Group | None:
    try:
        record = await _find(database, wanted)
        parent = None if record.parent is None else await workflows.find_group(database, record.parent)
    except NotFound:
        return None
    return _Group(record, parent, await queries.groups_in(database, record.id), await read_run(database, record.id))


async def _find(database: Database, wanted: str) -> JobGroupRecord:
    """A group by its id, or by its name, which may look like an id. Raises `NotFound`."""
    try:
        return await workflows.find_group(database, UUID(wanted))
    except (ValueError, NotFound):
        return await workflows.find_group(database, wanted)


async def _children(view: View, group: UUID, *, finished: bool, status: str | None = None) -> list[tuple[StoredJob, str]]:
    """The newest children, each with its last error."""
    search = JobSearch(status=status, group=group)
    return await view.read(_look_for, view.sight, search, finished, kept_s=2.0, follows=True)


async def _look_for(database: Database, sight: Sight, search: JobSearch, finished: bool) -> list[tuple[StoredJob, str]]:
    # An index leads to these jobs alone: it looks at no others.
    page = await queries.search(database, search, finished=finished, limit=_CHILDREN, most=_CHILDREN)
    stored = await http_queries.stored_jobs(database, page.ids)
    lines = [line_of(sight, stored[id]) for id in page.ids if id in stored]
    return [(job, error) for job, _, error in lines]


PAGES = [Page("workflows", show, all_types=True), Page("workflows/{id}", show_one, all_types=True)]
ACTIONS = [
    Action("workflows/{id}/cancel", cancel, Role.ENQUEUE, all_types=True),
    Action("workflows/{id}/retry", retry, Role.ENQUEUE, all_types=True),
]
