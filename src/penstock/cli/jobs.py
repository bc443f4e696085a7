"""Commands about jobs: list, show, cancel, replay, one or all that match a filter."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from penstock import JobRecord, Why
from penstock.cli.backend import Backend, with_backend
from penstock.cli.enqueueing import parse_json
from penstock.cli.operations import (
    AllMatching,
    DryRun,
    Key,
    OfStatus,
    Since,
    Type,
    Until,
    Wait,
    filter_of,
    on_all_matching,
    require_one,
)
from penstock.cli.output import AsJson, cell, out, print_json, print_table, say
from penstock.errors import InvalidInput
from penstock.operations.models import JobFilter

app = typer.Typer(help="Jobs: list, show, cancel, replay.", no_args_is_help=True)
Id = Annotated[str, typer.Argument(help="Id of the job, with or without job_.")]
OneId = Annotated[str | None, typer.Argument(help="Id of the job, with or without job_; or --all-matching.")]


@app.command("list")
def list_jobs(
    name: Annotated[str | None, typer.Option("--type", "-t", help="Only this job type.")] = None,
    status: Annotated[str | None, typer.Option("--status", "-s", help="Only this status.")] = None,
    key: Annotated[str | None, typer.Option(help="Only this key.")] = None,
    reason: Annotated[str | None, typer.Option(help="Only those that ended for this reason: quarantined.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    as_json: AsJson = False,
) -> None:
    """List jobs, latest first."""
    found = with_backend(lambda penstock: penstock.find_many(name=name, status=status, key=key, reason=reason, limit=limit))
    if as_json:
        print_json(found)
        return
    rows = []
    for job in found:
        error = job.errors[-1].get("message") if job.errors else None
        at = job.finished_at or job.started_at or job.run_after
        rows.append(
            (
                job.id,
                job.name,
                f"{job.status}: {job.reason}" if job.reason else job.status,
                f"{job.attempt}/{job.max_attempts}",
                job.key,
                at,
                error and str(error)[:60],
            )
        )
    print_table(["id", "type", "status", "attempt", "key", "at", "last error"], rows, empty="no such jobs")


@app.command()
def show(id: Id, as_json: AsJson = False) -> None:
    """Show everything known of a job."""

    async def read(penstock: Backend) -> tuple[JobRecord, Why | None]:
        job = await penstock.find(id)
        return job, None if job.status.finished else await penstock.why(id)

    job, why = with_backend(read)
    if as_json:
        print_json({**asdict(job), "why": why})
        return
    # A job in progress may wait too: a worker claims jobs of a key ahead.
    waits = None if why is None or why.reason == "running" else str(why)
    shown = [
        ("id", job.id), ("type", job.name), ("status", job.status), ("waits", waits),
        ("reason", job.reason), ("key", job.key),
        ("unique key", job.unique),
        ("priority", job.priority), ("attempt", f"{job.attempt} of {job.max_attempts}"), ("time limit", job.time_limit),
        ("snoozed", f"{job.snoozes} times" if job.snoozes else None),
        ("enqueued", job.created_at), ("run after", job.run_after), ("expires", job.expires_at), ("started", job.started_at),
        ("finished", job.finished_at), ("worker", job.worker), ("replay of", job.replay_of),
        ("replayed by", ", ".join(str(replay) for replay in job.replayed_by) or None),
        ("data", json.dumps(job.data, separators=(",", ":"), ensure_ascii=False)), ("progress", job.progress),
        ("result", job.result),
    ]  # fmt: skip
    for label, value in shown:
        if value is not None:
            out.print(f"[bold]{label:>14}[/bold]  {escape(cell(value))}", highlight=False)
    for line in job.log:
        out.print(f"[bold]{'log':>14}[/bold]  {line.at:%H:%M:%S} ({line.attempt})  {escape(line.line)}", highlight=False)
    for number, error in enumerate(job.errors, 1):
        out.print(f"[bold]{f'error {number}':>14}[/bold]  {escape(str(error.get('type')))}: {escape(str(error.get('message')))}")
        if trace := error.get("traceback"):
            out.print(escape(str(trace)), style="dim", highlight=False)


@app.command()
def cancel(
    id: OneId = None, all_matching: AllMatching = False, name: Type = None, status: OfStatus = None, key: Key = None,
    since: Since = None, until: Until = None, dry_run: DryRun = False, wait: Wait = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Cancel a job, or all that match: queued ones at once, of running ones the handlers are told."""
    require_one(id, all_matching)
    if id is None:
        wanted = filter_of(name, status, key, None, None, since, until)
        on_all_matching("cancel", wanted, dry_run=dry_run, wait=wait, as_json=as_json)
        return
    status = with_backend(lambda penstock: penstock.cancel(id))
    say({"id": id, "status": status}, f"{status}: {id}", as_json)


@app.command()
def replay(
    id: OneId = None,
    data: Annotated[str | None, typer.Option(help="Another payload for the copy, as JSON.")] = None,
    force: Annotated[bool, typer.Option(help="Also when a replay of it waits, runs or has succeeded.")] = False,
    all_matching: AllMatching = False,
    name: Type = None,
    status: Annotated[str | None, typer.Option("--status", "-s", help="With --all-matching: this status, not failed.")] = None,
    key: Key = None,
    reason: Annotated[str | None, typer.Option(help="With --all-matching: only those that ended for this reason.")] = None,
    error: Annotated[str | None, typer.Option(help="With --all-matching: only this type of the last error.")] = None,
    since: Since = None,
    until: Until = None,
    dry_run: DryRun = False,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Enqueue a copy of a running or finished job, or of all finished ones that match."""
    require_one(id, all_matching)
    if id is None:
        if data is not None or force:
            raise InvalidInput("--data and --force are for one job", hint="Leave them out with --all-matching.")
        wanted = filter_of(name, status, key, reason, error, since, until)
        on_all_matching("replay", wanted, dry_run=dry_run, wait=wait, as_json=as_json)
        return
    payload = None if data is None else parse_json(data, "the payload")
    receipt = with_backend(lambda penstock: penstock.replay(id, data=payload, force=force))
    say(receipt, f"replayed as {receipt.id}", as_json)


@app.command()
def purge(
    name: Annotated[str, typer.Option("--type", "-t", help="Job type or pool.")],
    key: Annotated[str | None, typer.Option(help="Only this key.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the jobs, and change nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end of the operation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Archive all jobs of a type or pool that wait as cancelled, with the reason purged. Running ones go on."""
    on_all_matching("purge", JobFilter(name=name, key=key), dry_run=dry_run, wait=wait, as_json=as_json)
