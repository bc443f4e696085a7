"""Commands about pools: their workers, who owns what, moving a worker out, growth, keys."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.cli.backend import Backend, BackendPool, with_backend, with_pool
from penstock.cli.output import AsJson, out, pass_on_json, print_json, print_table
from penstock.errors import NotFound
from penstock.jobs.models import Why
from penstock.pools.models import PoolDetails

Name = Annotated[str, typer.Argument(help="Pool.")]
Key = Annotated[str, typer.Argument(help="Key.")]
WorkerId = Annotated[str, typer.Argument(help="Id of a worker, as `penstock pools show` lists them.")]
_HELP = "Pools: create, show, drain, undrain, resize, key, keys, weight, standing, start, stop, notify. Alone: list them."


def pool_commands() -> typer.Typer:
    """The commands."""
    commands = typer.Typer(help=_HELP, invoke_without_command=True)
    commands.callback(help=_HELP)(list_pools)
    for command in (create, show, drain, undrain, resize, key, keys, weight):
        commands.command()(command)
    return commands


def list_pools(context: typer.Context, as_json: AsJson = False) -> None:
    """List the pools."""
    if pass_on_json(context, as_json):
        return

    columns = ["name", "workers", "slots", "moving", "ready", "in_progress", "oldest_ready_s", "standing", "standing_running"]
    found = with_backend(lambda backend: backend.list_pools())
    rows = [dict(zip(columns, _row(pool), strict=True)) for pool in found]
    if as_json:
        print_json(rows)
    else:
        print_table(columns, [list(row.values()) for row in rows], empty="no pools yet")


def create(
    name: Name,
    slots: Annotated[int, typer.Option(min=1, max=65_536, help="The most workers that it can keep busy; can grow.")] = 256,
    convert: Annotated[
        bool, typer.Option("--convert", help="Turn the plain job type of this name, with its jobs, into a pool.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a pool, for programs that enqueue before its application has run."""

    async def run(backend: Backend) -> PoolDetails:
        if not convert:
            with suppress(NotFound):
                # As a declaration does it: a pool that is there is left as it is.
                return await (await backend.find_pool(name)).details()
        return await backend.create_pool(name, slots=slots, convert=convert)

    _say(with_backend(run), f"created: {name}", as_json)


def show(name: Name, as_json: AsJson = False) -> None:
    """The workers of a pool, oldest first, and the slots of each."""
    workers = with_pool(name, lambda pool: pool.workers())
    if as_json:
        print_json([{"worker": worker.id, **asdict(worker)} for worker in workers])
        return
    print_table(
        ["worker", "state", "joined", "seen", "slots", "coming"],
        [(w.id or "(unowned)", w.state, w.joined_at, w.seen_at, _ranges(w.slots), _ranges(w.coming)) for w in workers],
        empty="no workers",
    )


def drain(name: Name, worker: WorkerId, as_json: AsJson = False) -> None:
    """Move a worker out: it stays in the pool, and gives its slots to the others."""
    _say(with_pool(name, lambda pool: pool.drain(worker)), f"draining {worker}", as_json)


def undrain(name: Name, worker: WorkerId, as_json: AsJson = False) -> None:
    """Let a drained worker take part again."""
    _say(with_pool(name, lambda pool: pool.undrain(worker)), f"{worker} takes part again", as_json)


def resize(
    name: Name, slots: Annotated[int, typer.Argument(help="New number of slots, more than now.")], as_json: AsJson = False
) -> None:
    """Give a live pool more slots."""

    async def run(pool: BackendPool) -> PoolDetails:
        await pool.resize(slots)
        return await pool.details()

    _say(with_pool(name, run), f"{name} has {slots} slots", as_json)


def key(
    name: Name,
    key: Key,
    release: Annotated[bool, typer.Option("--release", help="Quarantined: have the pool's rule asked again, now.")] = False,
    as_json: AsJson = False,
) -> None:
    """Where a key is: its slot, who has it, what waits and for what; why it is quarantined."""

    async def read(pool: BackendPool) -> tuple[dict[str, Any], Why | None]:
        if release:
            await pool.release_key(key)
        place = await pool.key_state(key)
        state = {name: value for name, value in asdict(place).items() if name != "key"}
        return state | {"quarantined": await pool.quarantine_of(key)}, place.why

    state, why = with_pool(name, read)
    if as_json:
        print_json({"key": key, **state})
    else:
        shown = {name: value for name, value in state.items() if name not in ("why", "next_job")}
        print_table(list(shown), [list(shown.values())], empty="")
        if why is not None:
            out.print(f"job {state['next_job']} waits: {why}", highlight=False, markup=False)


def keys(
    name: Name,
    quarantined: Annotated[bool, typer.Option("--quarantined", help="Those for which the pool's rule fails.")] = True,
    after: Annotated[str | None, typer.Option(help="Only keys behind this one.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="How many at most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Keys that are quarantined, since the pool's rule fails for them: their jobs wait."""
    found = [asdict(bad) for bad in with_pool(name, lambda pool: pool.quarantined_keys(after=after, limit=limit))]
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

    async def work(pool: BackendPool) -> dict[str, int]:
        await pool.set_weight(key, weight)
        return await pool.weights()

    _say({"weights": with_pool(name, work)}, f"{key} gets {weight} jobs a turn", as_json)


def _row(pool: PoolDetails) -> list[Any]:
    return [
        pool.name,
        pool.workers,
        pool.slots,
        pool.moving_slots,
        pool.ready,
        pool.in_progress,
        pool.oldest_ready_s,
        pool.standing,
        pool.standing_running,
    ]


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
