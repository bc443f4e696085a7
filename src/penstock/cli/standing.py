"""Commands about standing jobs, under `penstock pools`, and scaling advice."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.backend import with_backend, with_pool
from penstock.cli.enqueueing import parse_json
from penstock.cli.output import AsJson, print_json, print_table, say
from penstock.cli.pools import Key, Name, pool_commands
from penstock.cli.times import span
from penstock.errors import NotFound
from penstock.pools.models import StandingState

Data = Annotated[str, typer.Argument(help="Any JSON.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    commands = pool_commands()
    for command in (standing, start, stop, notify):
        commands.command()(command)
    app.add_typer(commands, name="pools")
    scale = typer.Typer(help="How many workers there should be.")
    scale.callback()(_scale)
    scale.command("advise")(advise)
    app.add_typer(scale, name="scale")


def standing(name: Name, as_json: AsJson = False) -> None:
    """The standing jobs of a pool: what runs where."""
    found = with_pool(name, lambda pool: pool.standing_jobs())
    if as_json:
        print_json(found)
        return
    print_table(
        ["key", "slot", "owner", "runs on", "since", "failures", "next try", "messages", "error"],
        [
            (
                job.key, job.slot, job.owner, _place(job) + ("" if job.wanted else ", stopping"),
                job.started_at if job.running_by else None, job.failures, job.retry_at, job.messages, _error(job),
            )
            for job in found
        ],
        empty="no standing jobs",
    )  # fmt: skip


def _place(job: StandingState) -> str:
    return job.running_by or ("(not running)" if job.owner else "(not running: no worker owns its slot)")


def _error(job: StandingState) -> str | None:
    return None if job.error is None else f"{job.error.get('type')}: {job.error.get('message')}"[:80]


def start(
    name: Name,
    key: Key,
    data: Data = "{}",
    replace: Annotated[bool, typer.Option(help="Replace the payload when it is another.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start the standing job of a key. `penstock pools standing` shows whether it runs, and why not."""
    payload = parse_json(data, "the payload")
    outcome = with_pool(name, lambda pool: pool.start(key, payload, replace=replace))
    say({"key": key, "outcome": outcome}, f"{outcome}: {key}", as_json)


def stop(name: Name, key: Key, as_json: AsJson = False) -> None:
    """Stop the standing job of a key, wherever it runs."""
    if not with_pool(name, lambda pool: pool.stop(key)):
        raise NotFound(f"no standing job with key {key} in pool {name}", hint=f"List them: penstock pools standing {name}")
    say({"key": key, "outcome": "stopped"}, f"stopped: {key}", as_json)


def notify(name: Name, key: Key, message: Data, as_json: AsJson = False) -> None:
    """Send a message to the standing job of a key."""
    payload = parse_json(message, "the message")
    with_pool(name, lambda pool: pool.notify(key, payload))
    say({"key": key, "outcome": "notified"}, f"notified: {key}", as_json)


def advise(
    wait: Annotated[str, typer.Option(help="How long a job should wait at most: 5s, 1m.")] = "5s",
    as_json: AsJson = False,
) -> None:
    """For each job type: how long jobs wait, how long the backlog takes at the recent rate, and how many workers it needs."""
    advice = with_backend(lambda app: app.scale_advice(wait=span(wait)))
    if as_json:
        print_json(advice)
        return
    print_table(
        ["name", "ready", "oldest s", "finished/s", "drain s", "workers", "advised"],
        [(a.name, a.ready, a.oldest_ready_s, a.finished_per_s, a.drain_s, a.workers, a.advised) for a in advice],
        empty="no job types yet",
    )


def _scale() -> None:
    """How many workers there should be."""
