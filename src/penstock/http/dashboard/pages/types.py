"""The job types: what waits of each, its limits and how full they are; pause, resume, change, enqueue."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from penstock.core.serialization import load_json
from penstock.errors import DatabaseUnavailable, InvalidInput
from penstock.history import lake_queries
from penstock.http import bodies
from penstock.http.auth import Role
from penstock.http.dashboard import queries
from penstock.http.dashboard.queries import PastLoad
from penstock.http.dashboard.rendering import pretty_json
from penstock.http.dashboard.view import ON_A_PAGE, Action, Done, Page, Shown, View, not_here, segment
from penstock.http.jobs.models import JobTypeOptions
from penstock.http.routing import unfit
from penstock.jobs import rates, type_queries
from penstock.jobs.models import NewJob
from penstock.jobs.records import HandlerRecord, JobTypeRecord
from penstock.jobs.top import top_keys
from penstock.worker import fleets

_MOST_KEYS = 20
_WEEK = timedelta(days=7)


async def show(view: View) -> Shown:
    """All job types that the user may see."""
    section = view.section(await _records(view), lambda record: record.name)
    names = [record.name for record in section.rows]
    # Only of what is shown: there may be any number of types.
    loads = await view.loads(names)
    found = await view.read(rates.type_rates, tuple(names), ON_A_PAGE, kept_s=30.0)
    by_type = {one.name: one for one in found}
    shown = [(record, loads.get(record.name), by_type.get(record.name)) for record in section.rows]
    return Shown("Job types", "types.html", {"types": shown, "section": section, "since": found[0].since if found else None})


async def show_one(view: View) -> Shown:
    """One job type."""
    name = view.parameters["name"]
    record = await _record(view, name)
    keys = await view.read(top_keys, name, _MOST_KEYS, kept_s=5.0, follows=True)
    workers = await view.read(fleets.workers)
    handlers = await view.read(type_queries.handlers, kept_s=10.0)
    return Shown(
        name,
        "type.html",
        {
            "type": record,
            "load": (await view.loads([name])).get(name),
            "keys": keys,
            "periods": await view.periods([name]),
            "past": await _past(view, name),
            # Only their number: a worker may work for others too.
            "workers": sum(worker.alive and name in worker.names for worker in workers),
            "handler": next((one for one in handlers if one.name == name and one.kind in ("job", "pool")), None),
        },
    )


async def _past(view: View, name: str) -> PastLoad | None:
    """The last week of the type, where a lake knows it."""
    with suppress(DatabaseUnavailable):
        lakes = await view.read(lake_queries.lakes, kept_s=10.0)
        if lakes:
            until = datetime.now(UTC).replace(second=0, microsecond=0)
            found = await view.read(queries.history_of, lakes[0].name, until - _WEEK, until, (name,), kept_s=60.0)
            return next(iter(found), None)
    return None


async def enqueue_form(view: View) -> Shown:
    """The form of a new job, from the schema of its payload."""
    name = view.parameters["name"]
    record = await _record(view, name)
    handlers = await view.read(type_queries.handlers, kept_s=10.0)
    handler = next((one for one in handlers if one.name == name and one.kind in ("job", "pool")), None)
    return Shown(f"Enqueue a job of {name}", "enqueue.html", {"type": record, "handler": handler, "payload": example_of(handler)})


async def pause(view: View) -> Done:
    """Start no more jobs of the type; running ones go on."""
    name = await _named(view)
    async with view.changing("pause", name=name):
        await type_queries.pause(await view.database(), name)
    return Done(f"types/{segment(name)}", "Paused: running jobs go on, and no other starts.")


async def resume(view: View) -> Done:
    """End a pause."""
    name = await _named(view)
    async with view.changing("resume", name=name):
        await type_queries.resume(await view.database(), name)
    return Done(f"types/{segment(name)}", "Resumed.")


async def change(view: View) -> Done:
    """Change limits of the type."""
    name = await _named(view)
    given = {field: view.number(field) for field in ("max_attempts", "concurrency", "rate_limit", "max_waiting", "max_crashes")}
    if given["max_attempts"] is None:
        raise InvalidInput("attempts is empty", hint="Write a number from 1 on.")
    period_s = None if given["rate_limit"] is None else view.number("rate_period_s") or 1
    try:
        options = JobTypeOptions.model_validate({**given, "rate_period_s": period_s}).as_options()
    except ValidationError as error:
        raise unfit(error, view.path) from None
    async with view.changing("change type", name=name, **{field: value for field, value in options.items() if value is not None}):
        await type_queries.change_job_type(await view.database(), name, options)
    return Done(f"types/{segment(name)}", "Changed. It holds from the next claim on.")


async def enqueue(view: View) -> Done:
    """Enqueue one job."""
    name = await _named(view)
    text = view.raw_text("data") or "null"
    data = load_json(text)
    bodies.check_data(text)
    priority = view.number("priority") or 0
    async with view.changing("enqueue", name=name):
        [enqueued] = await view.app.enqueue_many(name, [NewJob(data, key=view.text("key") or None, priority=priority)])
    return Done(f"jobs/{enqueued.id}", f"The job is {enqueued.outcome}.")


def example_of(handler: HandlerRecord | None) -> str:
    """A payload to begin with: the fields of the schema with their defaults or empty values, as JSON."""
    return pretty_json({} if handler is None or handler.schema is None else _example(handler.schema, handler.schema, 0))


def _example(schema: Any, root: dict[str, Any], depth: int) -> Any:
    if not isinstance(schema, dict) or depth > 8:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        place: Any = root
        with suppress(KeyError, TypeError):
            for part in reference.removeprefix("#/").split("/"):
                place = place[part]
            return _example(place, root, depth + 1)
        return None
    for word in ("default", "const"):
        if word in schema:
            return schema[word]
    if schema.get("examples"):
        return schema["examples"][0]
    if schema.get("enum"):
        return schema["enum"][0]
    for word in ("anyOf", "oneOf", "allOf"):
        if schema.get(word):
            return _example(schema[word][0], root, depth + 1)
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        return {name: _example(part, root, depth + 1) for name, part in schema.get("properties", {}).items()}
    return {"string": "", "integer": 0, "number": 0, "boolean": False, "array": []}.get(kind if isinstance(kind, str) else "")


async def _records(view: View) -> list[JobTypeRecord]:
    return [record for record in await view.read(type_queries.job_types) if view.user.may(record.name)]


async def _record(view: View, name: str) -> JobTypeRecord:
    found = next((record for record in await _records(view) if record.name == name), None)
    if found is None:
        raise not_here(f"job type {name}")
    return found


async def _named(view: View) -> str:
    name = view.parameters["name"]
    view.require(name)
    return name


PAGES = [Page("types", show), Page("types/{name}", show_one), Page("types/{name}/enqueue", enqueue_form, Role.ENQUEUE)]
ACTIONS = [
    Action("types/{name}/pause", pause),
    Action("types/{name}/resume", resume),
    Action("types/{name}/change", change),
    Action("types/{name}/new", enqueue, Role.ENQUEUE),
]
