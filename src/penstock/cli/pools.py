"""Commands about pools: their workers, who owns what, moving a worker out, growth, keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.app import Penstock
from penstock.cli.output import AsJson, out, print_json, print_table, with_app
from penstock.ownership import balance
from penstock.pool_workers import PoolMember, workers_of
from penstock.postgres import ownership, pool_views, pools

Name = Annotated[str, typer.Argument(help="Pool.")]
Key = Annotated[str, typer.Argument(help="Key.")]
WorkerId = Annotated[str, typer.Argument(help="Id of a worker, as `penstock pools show` lists them.")]
_HELP = "Pools: list, create, show, drain, undrain, resize, key, keys, weight, standing, start, stop, notify."


def pool_commands() -> typer.Typer:
    """The commands."""
    commands = typer.Typer(help=_HELP, invoke_without_command=True)
    commands.callback(help=_HELP)(list_pools)
    for command in (create, show, drain, undrain, resize, key, keys, weight):
        commands.command()(command)
    return commands


def list_pools(context: typer.Context, as_json: AsJson = False) -> None:
    """List the pools."""
    if context.invoked_subcommand is not None:
        return

    async def read(app: Penstock) -> list[dict[str, Any]]:
        jobs = {count.name: count for count in await app.counts()}
        return [
            {
                "name": pool.name,
                "workers": pool.workers,
                "slots": pool.slots,
                "moving": pool.moving_slots,
                "ready": jobs[pool.name].ready,
                "in_progress": jobs[pool.name].in_progress,
                "oldest_ready_s": jobs[pool.name].oldest_ready_s,
                "standing": pool.standing,
                "standing_running": pool.standing_running,
            }
            for pool in await pool_views.details(await app.database())
        ]

    rows = with_app(read)
    if as_json:
        print_json(rows)
    else:
        print_table(list(rows[0]) if rows else [], [list(row.values()) for row in rows], empty="no pools yet")


def create(
    name: Name,
    slots: Annotated[int, typer.Option(min=1, max=65_536, help="The most workers that it can keep busy; can grow.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Create a pool, for programs that enqueue before its application has run."""

    async def work(app: Penstock) -> pool_views.PoolDetails:
        database = await app.database()
        await pools.declare_pool(database, name, {"slots": slots}, {})
        return await pool_views.require(database, name)

    _say(with_app(work), f"created: {name}", as_json)


def show(name: Name, as_json: AsJson = False) -> None:
    """The workers of a pool, oldest first, and the slots of each."""

    async def read(app: Penstock) -> list[PoolMember]:
        database = await app.database()
        await pool_views.require(database, name)
        return await workers_of(database, name)

    workers = with_app(read)
    if as_json:
        print_json([{"worker": worker.id, **asdict(worker)} for worker in workers])
        return
    print_table(
        ["worker", "state", "joined", "seen", "slots", "coming"],
        [(w.id or "(nobody)", w.state, w.joined_at, w.seen_at, _ranges(w.slots), _ranges(w.coming)) for w in workers],
        empty="no workers",
    )


def drain(name: Name, worker: WorkerId, as_json: AsJson = False) -> None:
    """Move a worker out: it stays in the pool, and gives its slots to the others."""
    _say(_drained(name, worker, True), f"draining {worker}", as_json)


def undrain(name: Name, worker: WorkerId, as_json: AsJson = False) -> None:
    """Let a drained worker take part again."""
    _say(_drained(name, worker, False), f"{worker} takes part again", as_json)


def resize(
    name: Name, slots: Annotated[int, typer.Argument(help="New number of slots, more than now.")], as_json: AsJson = False
) -> None:
    """Give a live pool more slots."""

    async def work(app: Penstock) -> pool_views.PoolDetails:
        database = await app.database()
        await pools.resize(database, name, slots)
        await balance.rebalance(database, name, None)
        return await pool_views.require(database, name)

    _say(with_app(work), f"{name} has {slots} slots", as_json)


def key(
    name: Name,
    key: Key,
    release: Annotated[bool, typer.Option("--release", help="Quarantined: have the pool's rule asked again, now.")] = False,
    as_json: AsJson = False,
) -> None:
    """Where a key is: its slot, who has it, what waits; why it is quarantined."""

    async def read(app: Penstock) -> dict[str, Any]:
        database = await app.database()
        if release:
            await ownership.release_keys(database, name, key)
        state = asdict(await pool_views.key_state(database, name, key))
        return state | {
            "quarantined": next((bad.error for bad in await pool_views.quarantined_keys(database, name, key=key)), None)
        }

    state = with_app(read)
    if as_json:
        print_json({"key": key, **state})
    else:
        print_table(list(state), [list(state.values())], empty="")


def keys(
    name: Name,
    quarantined: Annotated[bool, typer.Option("--quarantined", help="Those for which the pool's rule fails.")] = True,
    after: Annotated[str | None, typer.Option(help="Only keys behind this one.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="How many at most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Keys that are quarantined, since the pool's rule fails for them: their jobs wait."""

    async def read(app: Penstock) -> list[pool_views.QuarantinedKey]:
        return await pool_views.quarantined_keys(await app.database(), name, after=after, limit=limit)

    found = [asdict(bad) for bad in with_app(read)]
    if as_json:
        print_json(found)
    else:
        print_table(list(found[0]) if found else [], [list(bad.values()) for bad in found], empty="no key is quarantined")


def weight(
    name: Name,
    key: Key,
    weight: Annotated[int, typer.Argument(min=1, max=1_000, help="Jobs in each of its turns.")],
    as_json: AsJson = False,
) -> None:
    """Say how many jobs a key gets in each of its turns."""

    async def work(app: Penstock) -> dict[str, int]:
        database = await app.database()
        await pools.set_weight(database, name, key, weight)
        return await pool_views.weights(database, name)

    _say({"weights": with_app(work)}, f"{key} gets {weight} jobs a turn", as_json)


def _drained(name: str, worker: str, drain: bool) -> PoolMember:
    async def work(app: Penstock) -> PoolMember:
        database = await app.database()
        await balance.drain(database, name, worker, None, drain=drain)
        return next(one for one in await workers_of(database, name) if one.id == worker)

    return with_app(work)


def _say(value: Any, text: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        out.print(text, highlight=False)


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
