"""Commands about jobs: list, show, their steps, cancel, replay, change the priority, of one or all that match a filter."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from penstock import JobRecord, StepRecord, Why
from penstock.cli.backend import Backend, group_named, with_backend
from penstock.cli.enqueueing import parse_json
from penstock.cli.operations import (
    AllMatching,
    DryRun,
    Key,
    OfStatus,
    OfWorkflow,
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

_MOST_STEPS = 1_000

app = typer.Typer(help="Jobs: list, show, their steps, cancel, replay, change the priority.", no_args_is_help=True)
Id = Annotated[str, typer.Argument(help="Id of the job, with or without job_.")]
OneId = Annotated[str | None, typer.Argument(help="Id of the job, with or without job_; or --all-matching.")]


@app.command("list")
def list_jobs(
    name: Annotated[str | None, typer.Option("--type", "-t", help="Only this job type.")] = None,
    status: Annotated[str | None, typer.Option("--status", "-s", help="Only this status.")] = None,
    key: Annotated[str | None, typer.Option(help="Only this key.")] = None,
    reason: Annotated[str | None, typer.Option(help="Only those that ended for this reason: quarantined.")] = None,
    workflow: Annotated[
        str | None, typer.Option("--workflow", "-w", help="Only children of this job group, by name or id.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    as_json: AsJson = False,
) -> None:
    """List jobs, latest first."""

    async def read(penstock: Backend) -> list[JobRecord]:
        of = None if workflow is None else await group_named(penstock, workflow)
        return await penstock.find_many(name=name, status=status, key=key, reason=reason, workflow=of, limit=limit)

    found = with_backend(read)
    if as_json:
        print_json(found)
        return
    rows = []
    for job in found:
        error = job.errors[-1].get("message") if job.errors else None
        at = job.finished_at or job.started_at or job.not_before
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

    async def read(penstock: Backend) -> tuple[JobRecord, Why | None, list[StepRecord]]:
        job = await penstock.find(id)
        return job, None if job.status.finished else await penstock.why(id), await penstock.steps(id, limit=_MOST_STEPS)

    job, why, steps_of_job = with_backend(read)
    if as_json:
        print_json({**asdict(job), "why": why, "steps": steps_of_job})
        return
    # A job in progress may wait too: a worker claims jobs of a key ahead.
    waits = None if why is None or why.reason == "running" else str(why)
    shown = [
        ("id", job.id), ("type", job.name), ("status", job.status), ("waits", waits),
        ("reason", job.reason), ("key", job.key),
        ("unique key", job.unique),
        ("priority", job.priority), ("attempt", f"{job.attempt} of {job.max_attempts}"), ("time limit", job.time_limit),
        ("snoozed", f"{job.snoozes} times" if job.snoozes else None),
        ("after", ", ".join(map(str, job.after)) or None), ("when", job.when if job.after else None), ("workflow", job.workflow),
        ("enqueued", job.created_at), ("run after", job.not_before), ("expires", job.expires_at), ("started", job.started_at),
        ("finished", job.finished_at), ("worker", job.worker), ("replay of", job.replay_of),
        ("replayed by", ", ".join(str(replay) for replay in job.replayed_by) or None),
        ("data", json.dumps(job.data, separators=(",", ":"), ensure_ascii=False)), ("progress", job.progress),
        ("result", job.result),
    ]  # fmt: skip
    for label, value in shown:
        if value is not None:
            out.print(f"[bold]{label:>14}[/bold]  {escape(cell(value))}", highlight=False)
    for step in steps_of_job:
        out.print(f"[bold]{'step':>14}[/bold]  {escape(step.name)}: {_line(step)}", highlight=False)
    if steps_of_job and len(steps_of_job) == _MOST_STEPS:
        out.print(f"[bold]{'step':>14}[/bold]  more: penstock jobs steps {job.id}", highlight=False)
    for line in job.log:
        out.print(f"[bold]{'log':>14}[/bold]  {cell(line.at)} ({line.attempt})  {escape(line.line)}", highlight=False)
    for number, error in enumerate(job.errors, 1):
        out.print(f"[bold]{f'error {number}':>14}[/bold]  {escape(str(error.get('type')))}: {escape(str(error.get('message')))}")
        if trace := error.get("traceback"):
            out.print(escape(str(trace)), style="dim", highlight=False)


@app.command()
def steps(
    id: Id,
    results: Annotated[bool, typer.Option("--results", help="With what each step returned, or was signalled.")] = False,
    after: Annotated[str | None, typer.Option(metavar="CURSOR", help="Only steps behind this one.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="How many at most.")] = 1_000,
    as_json: AsJson = False,
) -> None:
    """The durable steps of a job: when each was done, its size, and for what the job waits."""
    found = with_backend(lambda penstock: penstock.steps(id, after=after, limit=limit))
    if as_json:
        print_json(found)
        return
    columns = ["step", "kind", "at", "bytes", "state", "until", *(["result"] if results else [])]
    rows = [
        (step.name, step.kind, step.at, step.size, step.about, step.due, *([_result(step)] if results else [])) for step in found
    ]
    print_table(columns, rows, empty="no steps: its handler has not called job.step, sleep, wait_for or gather")
    if len(found) == limit:
        out.print(f"more: --after {shlex.quote(found[-1].cursor)}", highlight=False, markup=False)


@app.command()
def cancel(
    id: OneId = None, all_matching: AllMatching = False, name: Type = None, status: OfStatus = None, key: Key = None,
    since: Since = None, until: Until = None, workflow: OfWorkflow = None, dry_run: DryRun = False, wait: Wait = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Cancel a job, or all that match: queued ones at once, of running ones the handlers are told."""
    require_one(id, all_matching)
    if id is None:
        wanted = filter_of(name, status, key, None, None, since, until)
        on_all_matching("cancel", wanted, workflow=workflow, dry_run=dry_run, wait=wait, as_json=as_json)
        return
    status = with_backend(lambda penstock: penstock.cancel(id))
    say({"id": id, "status": status}, f"{status}: {id}", as_json)


@app.command("set-priority")
def set_priority(
    priority: Annotated[int, typer.Option("--priority", "-p", min=-100, max=100, help="-100 (first) to 100 (last).")],
    id: OneId = None,
    all_matching: AllMatching = False, name: Type = None, status: OfStatus = None, key: Key = None, since: Since = None,
    until: Until = None, workflow: OfWorkflow = None, dry_run: DryRun = False, wait: Wait = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Give a job that waits, or all that match, another priority within their type. Jobs of pools have none."""
    require_one(id, all_matching)
    if id is None:
        wanted = filter_of(name, status, key, None, None, since, until)
        on_all_matching("set-priority", wanted, workflow=workflow, dry_run=dry_run, wait=wait, as_json=as_json, priority=priority)
        return
    changed = with_backend(lambda penstock: penstock.set_priority(id, priority))
    said = f"priority {priority}: {id}" if changed else f"left as it is: {id} does not wait in a queue, or has this priority"
    say({"id": id, "changed": changed}, said, as_json)


@app.command("run-now")
def run_now(
    id: OneId = None,
    all_matching: AllMatching = False, name: Type = None, key: Key = None, since: Since = None, until: Until = None,
    workflow: OfWorkflow = None, dry_run: DryRun = False, wait: Wait = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Make a job, or all that match, due at once: those that wait for their time or for a further attempt."""
    require_one(id, all_matching)
    if id is None:
        wanted = filter_of(name, None, key, None, None, since, until)
        on_all_matching("run-now", wanted, workflow=workflow, dry_run=dry_run, wait=wait, as_json=as_json)
        return
    changed = with_backend(lambda penstock: penstock.run_now(id))
    said = f"due now: {id}" if changed else f"left as it is: {id} does not wait for its time or for a further attempt"
    say({"id": id, "changed": changed}, said, as_json)


@app.command()
def signal(
    id: Id,
    name: Annotated[str, typer.Argument(help="Name of the signal.")],
    value: Annotated[str | None, typer.Argument(help="What the handler gets, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Send a signal to a job, whose handler waits for it, or will."""
    sent = None if value is None else parse_json(value, "the value")
    first = with_backend(lambda penstock: penstock.signal(id, name, sent))
    said = f"signalled {name}: {id}" if first else f"job {id} has the signal {name} already, or its wait has timed out"
    say({"id": id, "name": name, "first": first}, said, as_json)


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
    signature: Annotated[str | None, typer.Option(help="With --all-matching: only this signature of the last error.")] = None,
    since: Since = None,
    until: Until = None,
    workflow: OfWorkflow = None,
    dry_run: DryRun = False,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Enqueue a copy of a running or finished job, or of all finished ones that match."""
    require_one(id, all_matching)
    if id is None:
        if data is not None or force:
            raise InvalidInput("--data and --force are for one job", hint="Leave them out with --all-matching.")
        wanted = filter_of(name, status, key, reason, error, since, until, signature)
        on_all_matching("replay", wanted, workflow=workflow, dry_run=dry_run, wait=wait, as_json=as_json)
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


def _line(step: StepRecord) -> str:
    until = f", until {cell(step.due)}" if step.due is not None and step.state in ("waiting", "begun") else ""
    size = "" if step.size is None else f", {step.size:,} bytes"
    return f"{step.about}{until}{size}, {cell(step.at)}"


def _result(step: StepRecord) -> str | None:
    if step.size is not None and step.result is None and step.size > len("null"):
        return "left out, since the results of this job are large"
    return None if step.size is None else json.dumps(step.result, separators=(",", ":"), ensure_ascii=False)
