"""Commands about pools: their workers, who owns what, moving a worker out, growth; and scaling advice."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.app import Penstock
from penstock.cli.output import AsJson, out, print_json, print_table, with_app
from penstock.errors import NotFound
from penstock.ownership import balance
from penstock.postgres import ownership, pools

Name = Annotated[str, typer.Argument(help="Pool.")]
WorkerId = Annotated[str, typer.Argument(help="Id of a worker, as `penstock pools show` lists them.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    commands = typer.Typer(help="Pools: list, show, drain, resize.", invoke_without_command=True)
    commands.callback()(list_pools)
    commands.command("show")(show)
    commands.command("drain")(drain)
    commands.command("undrain")(undrain)
    commands.command("resize")(resize)
    app.add_typer(commands, name="pools")
    scale = typer.Typer(help="How many workers there should be.")
    scale.callback()(_scale)
    scale.command("advise")(advise)
    app.add_typer(scale, name="scale")


def list_pools(context: typer.Context, as_json: AsJson = False) -> None:
    """Pools: list, show, drain, resize."""
    if context.invoked_subcommand is not None:
        return

    async def read(app: Penstock) -> list[dict[str, Any]]:
        jobs = {count.name: count for count in await app.counts()}
        return [
            {
                "name": pool.name,
                "workers": pool.members,
                "slots": pool.slots,
                "moving": pool.moving_slots,
                "ready": jobs[pool.name].ready,
                "in_progress": jobs[pool.name].in_progress,
                "oldest_ready_s": jobs[pool.name].oldest_ready_s,
                "standing": pool.standing,
                "standing_running": pool.standing_running,
            }
            for pool in await pools.counts(await app.database())
        ]

    rows = with_app(read)
    if as_json:
        print_json(rows)
    else:
        print_table(list(rows[0]) if rows else [], [list(row.values()) for row in rows], empty="no pools yet")


def show(name: Name, as_json: AsJson = False) -> None:
    """The workers of a pool, oldest first, and the slots of each."""

    async def read(app: Penstock) -> list[dict[str, Any]]:
        database = await app.database()
        await _require(app, name)
        slots = await ownership.slots(database, name)
        members = await ownership.members(database, name)
        rows = [
            {
                "worker": member.id,
                "state": member.state,
                "joined_at": member.joined_at,
                "seen_at": member.seen_at,
                "slots": [slot.key or slot.slot for slot in slots if slot.owner == member.id],
                "coming": [slot.key or slot.slot for slot in slots if slot.target == member.id and slot.owner != member.id],
                "metadata": member.metadata,
            }
            for member in members
        ]
        nobody = [slot.key or slot.slot for slot in slots if slot.owner is None]
        return [*rows, {"worker": None, "slots": nobody}] if nobody else rows

    rows = with_app(read)
    if as_json:
        print_json(rows)
        return
    print_table(
        ["worker", "state", "joined", "seen", "slots", "coming"],
        [
            (
                row["worker"] or "(nobody)",
                row.get("state"),
                row.get("joined_at"),
                row.get("seen_at"),
                _ranges(row["slots"]),
                _ranges(row.get("coming", [])),
            )
            for row in rows
        ],
        empty="no workers",
    )


def drain(name: Name, worker: WorkerId) -> None:
    """Move a worker out: it stays in the pool, and gives its slots to the others."""
    with_app(lambda app: _drain(app, name, worker, True))
    out.print(f"draining {worker}")


def undrain(name: Name, worker: WorkerId) -> None:
    """Let a drained worker take part again."""
    with_app(lambda app: _drain(app, name, worker, False))
    out.print(f"{worker} takes part again")


def resize(name: Name, slots: Annotated[int, typer.Argument(help="New number of slots, more than now.")]) -> None:
    """Give a live pool more slots."""

    async def work(app: Penstock) -> None:
        database = await app.database()
        await pools.resize(database, name, slots)
        await balance.rebalance(database, name, None)

    with_app(work)
    out.print(f"{name} has {slots} slots")


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


async def _drain(app: Penstock, name: str, worker: str, drain: bool) -> None:
    await balance.drain(await app.database(), name, worker, None, drain=drain)


async def _require(app: Penstock, name: str) -> None:
    known = [pool.name for pool in await pools.counts(await app.database())]
    if name not in known:
        raise NotFound(f"no such pool: {name}", hint=f"There are: {', '.join(known) or 'none'}.")


def _ranges(slots: list[int | str]) -> str:
    """Numbers as people write them: 0-3, 7."""
    if not all(isinstance(slot, int) for slot in slots):
        return ", ".join(str(slot) for slot in slots)
    parts: list[list[int]] = []
    for slot in sorted(int(slot) for slot in slots):
        if parts and parts[-1][-1] == slot - 1:
            parts[-1][1:] = [slot]
        else:
            parts.append([slot])
    return ", ".join("-".join(str(end) for end in part) for part in parts) or "-"
