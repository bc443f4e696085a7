"""Commands about operations on all jobs that match a filter, and what the commands for jobs share to start one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Annotated, Any

import typer

from penstock.cli.backend import Backend, group_named, with_backend
from penstock.cli.output import AsJson, out, pass_on_json, print_json, print_table
from penstock.cli.times import local_time, shown
from penstock.core.checks import parse_time
from penstock.errors import InvalidInput
from penstock.operations.models import JobFilter, OperationKind, OperationPreview, OperationRecord

app = typer.Typer(help="Operations on all jobs that match a filter: list, show, cancel.", invoke_without_command=True)
Id = Annotated[str, typer.Argument(help="Id of the operation.")]
AllMatching = Annotated[bool, typer.Option("--all-matching", help="All jobs that match the conditions, in an operation.")]
Type = Annotated[str | None, typer.Option("--type", "-t", help="With --all-matching: only this job type.")]
OfStatus = Annotated[str | None, typer.Option("--status", "-s", help="With --all-matching: only this status.")]
Key = Annotated[str | None, typer.Option(help="With --all-matching: only this key.")]
_ITS_ZONE = " A time without a zone is one of the terminal's."
Since = Annotated[
    str | None,
    typer.Option(metavar="TIME", help=f"With --all-matching: enqueued (finished jobs: finished) not before.{_ITS_ZONE}"),
]
Until = Annotated[
    str | None, typer.Option(metavar="TIME", help=f"With --all-matching: enqueued (finished jobs: finished) before.{_ITS_ZONE}")
]
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

    async def run(backend: Backend) -> OperationRecord | tuple[JobFilter, OperationPreview]:
        wanted = filter if workflow is None else replace(filter, workflow=await group_named(backend, workflow))
        if dry_run:
            return wanted, await backend.operations.preview(kind, wanted, priority=priority)
        started = await backend.operations.start(kind, wanted, priority=priority)
        return await backend.operations.wait(started.id, timeout=_LONGEST_WAIT) if wait else started

    found = with_backend(run)
    if isinstance(found, tuple):
        wanted, preview = found
        conditions = wanted.as_json()
        if as_json:
            print_json(asdict(preview) | {"kind": kind, "filter": conditions})
            return
        jobs = f"{'' if preview.whole else 'at least '}{preview.jobs} jobs"
        out.print(f"{kind} would apply to {jobs}: {_as_text(conditions)}", highlight=False, markup=False, soft_wrap=True)
        for id in preview.sample:
            out.print(f"  job_{id}", highlight=False)
    elif as_json:
        print_json(found)
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
    name: str | None, status: str | None, key: str | None, reason: str | None, error: str | None, since: str | None,
    until: str | None, signature: str | None = None,
) -> JobFilter:  # fmt: skip
    """The filter that the options of a command give. Raises `typer.BadParameter` for a time that is none."""
    begin, end = (None if text is None else local_time(text) for text in (since, until))
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
    return _as_text(record.filter)


def _as_text(conditions: Mapping[str, Any]) -> str:
    """The conditions of a filter, with its times in the zone of the terminal, which says the time that was meant."""
    return ", ".join(
        f"{name} {shown(parse_time(name, value)) if name in ('since', 'until') else value}" for name, value in conditions.items()
    )
