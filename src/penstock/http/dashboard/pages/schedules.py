"""The schedules: next and last runs, history, a run now, the pause of their job types."""

from __future__ import annotations

from penstock.http.auth import Role
from penstock.http.dashboard.view import Action, Done, Page, Shown, View, not_here, segment
from penstock.jobs import type_queries
from penstock.schedules import queries as schedules
from penstock.schedules.schedule import ScheduleRecord

_MOST_RUNS = 50


async def show(view: View) -> Shown:
    """All schedules that the user may see."""
    types = {one.name: one for one in await view.read(type_queries.job_types)}
    paused = {name for name, one in types.items() if one.paused_at is not None or one.concurrency == 0}
    section = view.section(await _records(view), lambda one: one.name)
    return Shown("Schedules", "schedules.html", {"schedules": section.rows, "paused": paused, "section": section})


async def show_one(view: View) -> Shown:
    """One schedule and its last runs."""
    name = view.parameters["name"]
    record = next((one for one in await _records(view) if one.name == name), None)
    if record is None:
        raise not_here(f"schedule {name}")
    runs = await view.read(schedules.runs, name, None, _MOST_RUNS)
    return Shown(name, "schedule.html", {"schedule": record, "runs": runs})


async def run(view: View) -> Done:
    """Run a schedule now, beside its times."""
    name = view.parameters["name"]
    view.require(name)
    async with view.changing("run schedule", name=name):
        id = await schedules.run_now(await view.database(), name)
    return Done(f"jobs/{id}" if id is not None else f"schedules/{segment(name)}", f"{name} runs now, beside its times.")


async def _records(view: View) -> list[ScheduleRecord]:
    return [record for record in await view.read(schedules.schedules) if view.user.may(record.name)]


PAGES = [Page("schedules", show), Page("schedules/{name}", show_one)]
ACTIONS = [Action("schedules/{name}/run", run, Role.ENQUEUE)]
