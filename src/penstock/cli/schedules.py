"""Commands about schedules: when they are due, what became of their last run; dropping one that left the code."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.backend import with_backend
from penstock.cli.output import AsJson, cell, out, pass_on_json, print_json, print_table
from penstock.errors import NotFound
from penstock.schedules.schedule import ScheduleRecord

app = typer.Typer(help="Schedules: next and last runs; dropping one.", invoke_without_command=True)
Name = Annotated[str, typer.Argument(help="Schedule.")]
_SHORT = 80


@app.callback(invoke_without_command=True)
def schedules(context: typer.Context, as_json: AsJson = False) -> None:
    """Every timer and cron schedule: when it is due, and what became of its last run."""
    if pass_on_json(context, as_json):
        return
    list_schedules(as_json)


@app.command("list")
def list_schedules(as_json: AsJson = False) -> None:
    """Every timer and cron schedule: when it is due, and what became of its last run."""
    found = with_backend(lambda opened: opened.list_schedules())
    if as_json:
        print_json(found)
        return
    print_table(
        ["schedule", "times", "runs as", "next", "last", "outcome", "error", "declared"],
        [(s.name, times(s), s.runs_as, s.next_at, s.last_at, s.last_outcome, _error(s), declared(s)) for s in found],
        empty="no schedules yet: @app.cron(...) or @app.timer(...), and a worker",
    )


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """One schedule with its last run and its last error."""
    found = with_backend(lambda opened: opened.list_schedules())
    record = next((one for one in found if one.name == name), None)
    if record is None:
        raise NotFound(f"no such schedule: {name}", hint="See: penstock schedules")
    if as_json:
        print_json(record)
        return
    rows = {
        "times": times(record),
        "runs as": record.runs_as,
        "next": record.next_at,
        "last": record.last_at,
        "started": record.last_started_at,
        "finished": record.last_finished_at,
        "outcome": record.last_outcome,
        "worker": record.last_worker,
        "job": record.job_id and f"job_{record.job_id}",
        "last error": record.last_error,
        "of": record.last_error_at,
        "declared": declared(record),
    }
    print_table(["schedule", name], list(rows.items()), empty="")


@app.command()
def drop(name: Name, as_json: AsJson = False) -> None:
    """Forget a schedule that left the code. Its job type and the history of its runs stay."""
    with_backend(lambda opened: opened.drop_schedule(name))
    if as_json:
        print_json({"name": name, "dropped": True})
    else:
        out.print(f"dropped: {name}", highlight=False)


def times(schedule: ScheduleRecord) -> str:
    """When it runs."""
    return f"every {schedule.spec} s" if schedule.kind == "every" else schedule.spec


def declared(schedule: ScheduleRecord) -> str:
    """Whether a running worker declares it."""
    return "yes" if schedule.declared else f"not since {cell(schedule.declared_at)}"


def _error(schedule: ScheduleRecord) -> str | None:
    """The error of the last run; one of an earlier run is for `show`."""
    if schedule.last_error is None or schedule.last_outcome == "succeeded":
        return None
    return schedule.last_error if len(schedule.last_error) <= _SHORT else f"{schedule.last_error[:_SHORT]}..."
