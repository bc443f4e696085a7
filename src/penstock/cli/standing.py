"""Commands about standing jobs, under `penstock pools`, and scaling advice."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
import typer

from penstock.app import Penstock
from penstock.cli.enqueueing import parse_json
from penstock.cli.output import AsJson, out, print_json, print_table, with_app
from penstock.cli.pools import Key, Name, pool_commands
from penstock.errors import NotFound
from penstock.payload import dump_json
from penstock.postgres import pool_views, pools

Data = Annotated[str, typer.Argument(help="Any JSON.")]
_PAGE = 1_000


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

    async def read(app: Penstock) -> list[pool_views.StandingState]:
        database = await app.database()
        found: list[pool_views.StandingState] = []
        while True:
            page = await pool_views.standing_jobs(database, name, after=found[-1].key if found else None, limit=_PAGE)
            found += page
            if len(page) < _PAGE:
                return found

    found = with_app(read)
    if as_json:
        print_json([_plain(job) for job in found])
        return
    print_table(
        ["key", "slot", "owner", "runs on", "since", "failures", "next try", "messages"],
        [
            (
                job.key, job.slot, job.owner, (job.running_by or "(not running)") + ("" if job.wanted else ", stopping"),
                job.started_at if job.running_by else None, job.failures, job.retry_at, job.messages,
            )
            for job in found
        ],
        empty="no standing jobs",
    )  # fmt: skip


def start(
    name: Name,
    key: Key,
    data: Data = "{}",
    replace: Annotated[bool, typer.Option(help="Replace the payload when it is another.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start the standing job of a key."""

    async def work(app: Penstock) -> str:
        return await pools.start_standing(
            await app.database(), name, key, dump_json(parse_json(data, "the payload"), key), replace=replace
        )

    _say({"key": key, "outcome": with_app(work)}, "outcome", as_json)


def stop(name: Name, key: Key, as_json: AsJson = False) -> None:
    """Stop the standing job of a key, wherever it runs."""

    async def work(app: Penstock) -> None:
        if not await pools.stop_standing(await app.database(), name, key):
            raise NotFound(f"no standing job with key {key} in pool {name}", hint=f"List them: penstock pools standing {name}")

    with_app(work)
    _say({"key": key, "outcome": "stopped"}, "outcome", as_json)


def notify(name: Name, key: Key, message: Data, as_json: AsJson = False) -> None:
    """Send a message to the standing job of a key."""

    async def work(app: Penstock) -> None:
        await pools.notify_standing(await app.database(), name, key, dump_json(parse_json(message, "the message"), key))

    with_app(work)
    _say({"key": key, "outcome": "notified"}, "outcome", as_json)


def advise(
    wait_s: Annotated[float, typer.Option("--wait", min=0.001, help="Seconds that a job should wait at most.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """For each job type: how long jobs wait, how long the backlog takes at the recent rate, and how many workers it needs."""
    advice = with_app(lambda app: app.scale_advice(wait_s=wait_s))
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


def _say(value: dict[str, Any], field: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        out.print(f"{value[field]}: {value['key']}", highlight=False)


def _plain(job: pool_views.StandingState) -> dict[str, Any]:
    fields = {name: getattr(job, name) for name in pool_views.StandingState.__dataclass_fields__}
    return fields | {name: None if fields[name] is None else orjson.loads(fields[name]) for name in ("data", "state", "error")}
