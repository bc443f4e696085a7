"""Job groups: open, look at, seal and cancel them. Children are enqueued as every job is, with `group`."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Depends, Path, Query
from pydantic import Field

from penstock.core.records import example
from penstock.errors import NotFound
from penstock.http import bodies
from penstock.http.models import Model, Word
from penstock.http.routing import ENQUEUE, READ, Instance, OpenDatabase, RawBody, User, body, router
from penstock.jobs.group_record import JobGroupRecord
from penstock.postgres.database import Database
from penstock.workflows import queries

api = router("workflows")
GroupName = Annotated[str, Path(description="Name or id of the job group.", examples=["import-2026-01-11"], max_length=255)]
Open = Annotated[bool, Query(description="Only those that have not ended.")]
Most = Annotated[int, Query(description="How many at most.", ge=1, le=1_000)]
_EXAMPLE = {"name": "import-2026-01-11", "then": "report", "on_failure": "cancel"}


class NewGroup(Model):
    """A job group to be opened; to open it again is the same group."""

    model_config = example(_EXAMPLE)

    name: Word
    then: str | None = Field(None, description="Job type of the job that runs once when the group has ended.")
    then_data: Any = Field({}, description="Its payload.")
    then_key: Word | None = Field(None, description="Its key, which a pool needs.")
    on_failure: Literal["cancel", "continue"] = Field(
        "cancel", description="cancel: the first child that fails cancels the others."
    )
    parent: UUID | None = Field(None, description="Id of the job group of which it is a child.")


async def _whole(user: User, path: Instance) -> None:
    """A group has children of any job type, so only users with access to all of them may know of it."""
    user.require_any("the children of a job group", path)


async def _group(name: GroupName, database: OpenDatabase) -> JobGroupRecord:
    try:
        return await queries.find_group(database, UUID(name))
    except (ValueError, NotFound):
        return await queries.find_group(database, name)


WHOLE = Depends(_whole)
Group = Annotated[JobGroupRecord, Depends(_group)]
NewBody = Annotated[NewGroup, body(NewGroup, _EXAMPLE)]


@api.post("/v1/workflows", dependencies=[ENQUEUE, WHOLE], status_code=201)
async def open_group(new: NewBody, sent: RawBody, database: OpenDatabase) -> JobGroupRecord:
    """Open a job group, or find the one of this name. 409 when it was opened with other options."""
    sent_data = bodies.field_text(sent, "then_data")
    data = "{}" if sent_data is None else bodies.check_data(sent_data)
    await queries.open_group(database, queries.NewGroup(new.name, new.then, data, new.on_failure, new.parent, new.then_key))
    return await queries.find_group(database, new.name)


@api.get("/v1/workflows", dependencies=[READ, WHOLE])
async def list_groups(database: OpenDatabase, open: Open = False, limit: Most = 50) -> list[JobGroupRecord]:
    """Job groups, latest first, with the numbers of their children."""
    return await queries.groups(database, limit, open=open)


@api.get("/v1/workflows/{name:key}", dependencies=[READ, WHOLE])
async def get_group(group: Group) -> JobGroupRecord:
    """One job group."""
    return group


@api.post("/v1/workflows/{name:key}/seal", dependencies=[ENQUEUE, WHOLE])
async def seal_group(group: Group, database: OpenDatabase) -> JobGroupRecord:
    """Say that no more children come, apart from those that children enqueue: the group ends with the last of them."""
    return await _after(database, group, queries.seal_group)


@api.post("/v1/workflows/{name:key}/cancel", dependencies=[ENQUEUE, WHOLE])
async def cancel_group(group: Group, database: OpenDatabase) -> JobGroupRecord:
    """Cancel the children of a job group, the groups in it, and its `then`. One that has ended stays as it is."""
    return await _after(database, group, queries.cancel_group)


async def _after(database: Database, group: JobGroupRecord, change: Any) -> JobGroupRecord:
    await change(database, group.id)
    return await queries.find_group(database, group.id)
