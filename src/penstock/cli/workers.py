"""Commands about workers: who works, where, for which fleet; and letting one stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.backend import with_backend
from penstock.cli.output import AsJson, pass_on_json, print_json, print_table, say
from penstock.cli.times import shown

if TYPE_CHECKING:
    from penstock.worker.fleets import WorkerRecord

app = typer.Typer(help="Workers: who works, and where; draining one.", invoke_without_command=True)


@app.callback(invoke_without_command=True)
@app.command("list")
def workers(context: typer.Context, as_json: AsJson = False) -> None:
    """Every worker: where it runs, the fleet that it is of, what it runs, and the job that blocks its event loop."""
    if pass_on_json(context, as_json):
        return

    found = with_backend(lambda backend: backend.workers())
    if as_json:
        print_json(found)
        return
    print_table(
        [
            "worker",
            "state",
            "host",
            "pid",
            "fleet",
            "version",
            "works on",
            "in flight",
            "places",
            "seen",
            "blocked by",
            "halted",
            "no key for",
        ],
        [
            (
                w.id,
                w.state if w.alive else "silent",
                w.host,
                w.pid,
                w.fleet,
                w.code_version or (w.version and f"Penstock {w.version}"),
                "\n".join(_works_on(w)),
                w.in_flight,
                w.concurrency,
                w.seen_at,
                _blocked(w),
                ", ".join(w.halted) or None,
                ", ".join(name if key is None else f"{name} ({key})" for name, key in w.no_key.items()) or None,
            )
            for w in found
        ],
        empty="no workers: penstock worker MODULE:APP",
    )


def _works_on(worker: WorkerRecord) -> list[str]:
    """A line for each kind of what it works on."""
    kinds = [
        ("types", worker.names), ("pools", worker.pools), ("topics", worker.topics), ("consumers", worker.consumers),
        ("schedules", worker.schedules), ("leader", worker.leader_tasks),
    ]  # fmt: skip
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds if names]


def _blocked(worker: WorkerRecord) -> str | None:
    if worker.blocked_since is None:
        return None
    return f"{worker.blocked_by or 'something'} since {shown(worker.blocked_since)}"


@app.command()
def drain(worker: Annotated[str, typer.Argument(help="Id of the worker.")], as_json: AsJson = False) -> None:
    """Let one worker of a fleet finish what it runs, and end."""
    fleet = with_backend(lambda backend: backend.drain_worker(worker))
    say({"worker": worker, "fleet": fleet}, f"draining: {worker} of the fleet {fleet}", as_json)
