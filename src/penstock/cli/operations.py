"""Commands about operations on all jobs that match a filter, and what the commands for jobs share to start one."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated

import typer

from penstock.cli.backend import Backend, group_named, with_backend
from penstock.cli.output import AsJson, out, pass_on_json, print_json, print_table
from penstock.errors import InvalidInput
from penstock.operations.models import JobFilter, OperationKind, OperationPreview, OperationRecord

app = typer.Typer(help="Operations on all jobs that match a filter: list, show, cancel.", invoke_without_command=True)
Id = Annotated[str, typer.Argument(help="Id of the operation.")]
AllMatching = Annotated[bool, typer.Option("--all-matching", help="All jobs that match the conditions, in an operation.")]
Type = Annotated[str | None, typer.Option("--type", "-t", help="With --all-matching: only this job type.")]
OfStatus = Annotated[str | None, typer.Option("--status", "-s", help="With --all-matching: only this status.")]
Key = Annotated[str | None, typer.Option(help="With --all-matching: only this key.")]
Since = Annotated[datetime | None, typer.Option(help="With --all-matching: enqueued (finished jobs: finished) not before, UTC.")]
Until = Annotated[datetime | None, typer.Option(help="With --all-matching: enqueued (finished jobs: finished) before, UTC.")]
OfWorkflow = Annotated[
    str | None, typer.Option("--workflow", "-w", help="With --all-matching: only children of this job group, by name or id.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With --all-matching: count the jobs, and change nothing.")]
Wait = Annotated[bool, typer.Option("--wait", help="With --all-matching: wait for the end of the operation.")]
_LONGEST_WAIT = timedelta(days=1)


def on_all_matching(
    kind: OperationKind, filter: JobFilter, *, workflow: str | None = None, dry_run: bool, wait: bool, as_json: bool,
    priority: int | None = None,
) -> None:  # fmt: skip
    """Start an operation, or (dry run) preview it, and print what came of it. `workflow`: a job group, by name or id."""

    async def run(backend: Backend) -> OperationRecord | OperationPreview:
        wanted = filter if workflow is None else replace(filter, workflow=await group_named(backend, workflow))
        if dry_run:
            return await backend.operations.preview(kind, wanted, priority=priority)
        started = await backend.operations.start(kind, wanted, priority=priority)
        return await backend.operations.wait(started.id, timeout=_LONGEST_WAIT) if wait else started

    found = with_backend(run)
    if as_json:
        print_json(found)
    elif isinstance(found, OperationPreview):
        out.print(f"{kind} would apply to {'' if found.whole else 'at least '}{found.jobs} jobs", highlight=False)
        for id in found.sample:
            out.print(f"  job_{id}", highlight=False)
    else:
        print_operation(found)


def require_one(id: str | None, all_matching: bool) -> None:
    """Raise `InvalidInput` unless either a job or --all-matching is given."""
    if (id is None) is not all_matching:
        raise InvalidInput(
            "exactly one of the id of a job and --all-matching is required",
            hint="For example: penstock jobs cancel --all-matching --type invoice-shipments",
        )


def filter_of(
    name: str | None, status: str | None, key: str | None, reason: str | None, error: str | None, since: datetime | None,
    until: datetime | None, signature: str | None = None,
) -> JobFilter:  # fmt: skip
    """The filter that the options of a command give. Their times are UTC."""
    from datetime import UTC

    begin, end = (time and time.replace(tzinfo=UTC) for time in (since, until))
    return JobFilter(name, status, key, reason, error, begin, end, signature=signature)


@app.callback(invoke_without_command=True)
def operations(context: typer.Context, as_json: AsJson = False) -> None:
    """Every operation, the latest first."""
    if pass_on_json(context, as_json):
        return
    list_operations(False, 50, as_json)


@app.command("list")
def list_operations(
    running: Annotated[bool, typer.Option("--running", help="Only those that have not ended.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 50,
    as_json: AsJson = False,
) -> None:
    """Every operation, the latest first."""
    found = with_backend(lambda opened: opened.operations.list(running=running, limit=limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ["operation", "kind", "jobs", "state", "started", "done", "skipped", "failed"],
        [
            (each.id, each.kind, _conditions(each), each.state, each.started_at, each.done, each.skipped, each.failed)
            for each in found
        ],
        empty="no operations yet: penstock jobs cancel --all-matching, or penstock jobs replay --all-matching",
    )


@app.command()
def show(id: Id, as_json: AsJson = False) -> None:
    """One operation, and how far it is."""
    found = with_backend(lambda opened: opened.operations.find(id))
    if as_json:
        print_json(found)
    else:
        print_operation(found)


@app.command()
def cancel(id: Id, as_json: AsJson = False) -> None:
    """End an operation after its current batch. What it has changed stays so."""
    found = with_backend(lambda opened: opened.operations.cancel(id))
    if as_json:
        print_json(found)
    else:
        print_operation(found)


def print_operation(record: OperationRecord) -> None:
    """Print an operation, and how far it is."""
    rows = {
        "does": record.kind,
        "jobs": _conditions(record),
        "state": record.state,
        **({"phase": record.phase} if record.phase else {}),
        "started": record.started_at,
        "by": record.started_by,
        "finished": record.finished_at,
        "looked at": record.looked_at,
        "done": record.done,
        **{f"  {kind}": count for kind, count in (record.counts or {}).items()},
        "skipped": record.skipped,
        "failed": record.failed,
        "postponed": record.postponed,
        "last error": record.error,
    }
    print_table(["operation", str(record.id)], list(rows.items()), empty="")


def _conditions(record: OperationRecord) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.filter.items())
