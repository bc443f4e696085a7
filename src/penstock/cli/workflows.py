"""Commands about workflows: job groups and runs of graphs, how far they are; cancelling one, retrying a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.tree import Tree

from penstock.cli.backend import Backend, find_group, group_named, with_backend
from penstock.cli.output import AsJson, cell, out, pass_on_json, print_json, print_table, say
from penstock.errors import NotFound
from penstock.jobs.group_record import JobGroupRecord
from penstock.workflows.models import WorkflowRunRecord, WorkflowStepRecord

app = typer.Typer(help="Workflows: job groups and runs, how far they are; cancel, retry.", invoke_without_command=True)
Name = Annotated[str, typer.Argument(help="Name or id of the job group, or id of the run.")]
Open = Annotated[bool, typer.Option("--open", help="Only those that have not ended.")]
Most = Annotated[int, typer.Option("--limit", "-n", min=1, max=1_000, help="How many at most.")]


@app.callback(invoke_without_command=True)
def workflows(context: typer.Context, as_json: AsJson = False) -> None:
    """Job groups, latest first, with the numbers of their children."""
    if not pass_on_json(context, as_json):
        list_groups(as_json=as_json)


@app.command("list")
def list_groups(open: Open = False, limit: Most = 50, as_json: AsJson = False) -> None:
    """Job groups, latest first, with the numbers of their children."""
    found = with_backend(lambda penstock: penstock.job_groups(open=open, limit=limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ["group", "status", "children", "succeeded", "failed", "cancelled", "expired", "opened", "ended"],
        [(g.name, g.status, g.added, g.succeeded, g.failed, g.cancelled, g.expired, g.created_at, g.finished_at) for g in found],
        empty="no job groups yet: async with app.job_group(...)",
    )


@app.command()
def runs(
    workflow: Annotated[str | None, typer.Argument(help="Name of the workflow; default: all.")] = None,
    open: Open = False,
    limit: Most = 50,
    as_json: AsJson = False,
) -> None:
    """Runs of workflows, latest first, with the numbers of their steps."""
    found = with_backend(lambda penstock: penstock.workflow_runs(workflow, open=open, limit=limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ["run", "workflow", "status", "steps", "succeeded", "failed", "cancelled", "retry of", "started", "ended"],
        [
            (
                r.name, r.workflow, r.status, r.steps, r.succeeded + r.shared, r.failed, r.cancelled + r.expired, r.retry_of,
                r.created_at, r.finished_at,
            )
            for r in found
        ],
        empty="no runs yet: await workflow.start(id=...)",
    )  # fmt: skip


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """One job group with everything known of it; a run of a workflow as a tree of its steps, with times."""
    run = with_backend(lambda penstock: _run(penstock, name))
    if run is not None:
        if as_json:
            print_json({**asdict(run[0]), "steps": [asdict(step) for step in run[1]]})
        else:
            print_run(*run)
        return
    found = with_backend(lambda penstock: find_group(penstock, name))
    if as_json:
        print_json(found)
        return
    for label, value in {**asdict(found), "ended": f"{found.ended} of {found.added}"}.items():
        if value is not None:
            out.print(f"[bold]{label.replace('_', ' '):>14}[/bold]  {escape(cell(value))}", highlight=False)


@app.command()
def cancel(name: Name, as_json: AsJson = False) -> None:
    """Cancel the children of a job group, the groups in it, and its `then`."""

    async def change(penstock: Backend) -> JobGroupRecord:
        return await penstock.cancel_group(await group_named(penstock, name))

    found = with_backend(change)
    say(found, f"{found.status}: {found.name}", as_json)


@app.command()
def retry(
    name: Annotated[str, typer.Argument(help="Id of the run.")],
    from_step: Annotated[
        str | None, typer.Option("--from", help="Step from which on; default: the steps that did not succeed.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", help="Id of the new run; default: the old one with ~2, ~3, ...")] = None,
    as_json: AsJson = False,
) -> None:
    """Retry a run of a workflow that has ended, as a new run, which shares the results of the other steps."""
    found = with_backend(lambda penstock: penstock.retry_workflow(name, from_step=from_step, id=id))
    say(found, f"started: {found.name}, which shares {found.shared} of {found.steps} steps", as_json)


async def _run(penstock: Backend, name: str) -> tuple[WorkflowRunRecord, list[WorkflowStepRecord]] | None:
    """A run with its steps; None: there is none of this name, which may be that of a job group."""
    try:
        run = await penstock.find_workflow_run(name)
    except NotFound:
        return None
    return run, await penstock.workflow_steps(run.id)


def print_run(run: WorkflowRunRecord, steps: list[WorkflowStepRecord]) -> None:
    """Print a run as a tree. A step stands below the last of the steps after which it runs, and names the others."""
    ended = f", ended {cell(run.finished_at)}" if run.finished_at else ""
    retried = (f", retry of {run.retry_of}" if run.retry_of else "") + (
        f", retried by {run.retried_by}" if run.retried_by else ""
    )
    about = f"{run.workflow}  {run.status}, started {cell(run.created_at)}{ended}{retried}"
    root = Tree(f"[bold]{escape(run.name)}[/bold]  {escape(about)}")
    places: dict[int, Tree] = {}
    names = {step.place: step.name for step in steps}
    for step in steps:
        last = max(step.after, default=None)
        above = root if last is None else places[last]
        others = [names[place] for place in step.after if place != last]
        places[step.place] = above.add(_line(step, others))
    out.print(root, highlight=False)


def _line(step: WorkflowStepRecord, others: list[str]) -> str:
    parts = [f"[bold]{escape(step.name)}[/bold]", step.status if step.reason is None else f"{step.status} ({step.reason})"]
    if step.jobs is not None:
        parts.append(f"{step.ended} of {step.jobs} jobs" + (f", {step.failed} failed" if step.failed else ""))
    if step.shared:
        parts.append("from the run before")
    elif step.finished_at and (begin := step.started_at or step.created_at):
        parts.append(f"{(step.finished_at - begin).total_seconds():.1f} s, ended {cell(step.finished_at)}")
    elif step.started_at:
        parts.append(f"since {cell(step.started_at)}")
    if step.attempt > 1:
        parts.append(f"attempt {step.attempt}")
    if others:
        parts.append(f"also after {', '.join(others)}")
    if step.error and step.status != "succeeded":
        parts.append(step.error[:100])
    return "  ".join([parts[0], *(escape(part) for part in parts[1:])])
