"""Commands about schedules: when they are due, what became of their runs, running one now, dropping one that left the code."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.backend import with_backend
from penstock.cli.output import AsJson, cell, pass_on_json, print_json, print_table, say
from penstock.errors import NotFound
from penstock.schedules.schedule import ScheduleRecord

app = typer.Typer(help="Schedules: next and last runs; running one now, dropping one.", invoke_without_command=True)
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
        ["schedule", "times", "runs as", "next", "last", "outcome", "failures", "error", "declared"],
        [(s.name, times(s), s.runs_as, s.next_at, s.last_at, s.last_outcome, s.failures, _error(s), declared(s)) for s in found],
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
        "next": ", ".join(map(cell, record.upcoming())) or None,
        "run requested": record.requested_at,
        "last": record.last_at,
        "started": record.last_started_at,
        "finished": record.last_finished_at,
        "outcome": record.last_outcome,
        "worker": record.last_worker,
        "job": record.job_id and f"job_{record.job_id}",
        "last error": record.last_error,
        "of": record.last_error_at,
        "failures in a row": record.failures,
        "declared": declared(record),
    }
    print_table(["schedule", name], list(rows.items()), empty="")


@app.command()
def runs(
    name: Name,
    status: Annotated[str | None, typer.Option("--status", "-s", help="Only runs with this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    as_json: AsJson = False,
) -> None:
    """The last runs of a schedule, latest first; none when it runs in place."""
    found = with_backend(lambda opened: opened.schedule_runs(name, status=status, limit=limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ["job", "for", "status", "started", "finished", "attempt", "worker", "error"],
        [(f"job_{r.id}", r.at, r.status, r.started_at, r.finished_at, r.attempt, r.worker, _short(r.error)) for r in found],
        empty="no such runs",
    )


@app.command()
def run(
    name: Name,
    key: Annotated[str | None, typer.Option(help="Key of the job of the run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a schedule now, beside its times."""
    id = with_backend(lambda opened: opened.run_schedule(name, key=key))
    say({"name": name, "job_id": id}, f"enqueued: job_{id}" if id is not None else f"requested: a worker runs {name}", as_json)


@app.command()
def drop(name: Name, as_json: AsJson = False) -> None:
    """Forget a schedule that left the code. Its job type and the history of its runs stay."""
    with_backend(lambda opened: opened.drop_schedule(name))
    say({"name": name, "dropped": True}, f"dropped: {name}", as_json)


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
    return _short(schedule.last_error)


def _short(error: str | None) -> str | None:
    return error if error is None or len(error) <= _SHORT else f"{error[:_SHORT]}..."
