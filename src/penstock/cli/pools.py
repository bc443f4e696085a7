"""Commands about pools: their workers, who owns what, moving a worker out, growth, keys and their jobs."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.cli.backend import Backend, BackendPool, with_backend, with_pool
from penstock.cli.output import AsJson, out, pass_on_json, print_json, print_table, say
from penstock.errors import NotFound
from penstock.pools.models import KeyState, PoolDetails

Name = Annotated[str, typer.Argument(help="Pool.")]
Key = Annotated[str, typer.Argument(help="Key.")]
WorkerId = Annotated[str, typer.Argument(help="Id of a worker, as `penstock pools show` lists them.")]
HELP = (
    "Pools: list, create, drop, show, jobs, drain, undrain, resize, key, keys, pause-key, resume-key, weight, standing, start,"
    " stop, notify."
)


def pool_commands() -> typer.Typer:
    """The commands."""
    commands = typer.Typer(help=HELP, invoke_without_command=True)
    commands.callback(help=HELP)(list_pools)
    commands.command("list")(list_pools)
    for command in (create, drop, show, jobs, drain, undrain, resize, key, keys, pause_key, resume_key, weight):
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

    say(with_backend(run), f"created: {name}", as_json)


def drop(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option(help="Also with standing jobs, and while jobs wait; they are archived as cancelled.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Drop a pool with its job type, keys and standing jobs. What is archived of its jobs stays."""
    if not yes:
        typer.confirm(f"Drop pool {name}?", abort=True)
    with_backend(lambda backend: backend.drop_pool(name, force=force))
    say({"name": name, "dropped": True}, f"dropped: {name}", as_json)


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
    say(with_pool(name, lambda pool: pool.drain(worker)), f"draining {worker}", as_json)


def undrain(name: Name, worker: WorkerId, as_json: AsJson = False) -> None:
    """Let a drained worker take part again."""
    say(with_pool(name, lambda pool: pool.undrain(worker)), f"{worker} takes part again", as_json)


def resize(
    name: Name, slots: Annotated[int, typer.Argument(help="New number of slots, more than now.")], as_json: AsJson = False
) -> None:
    """Give a live pool more slots."""

    async def run(pool: BackendPool) -> PoolDetails:
        await pool.resize(slots)
        return await pool.details()

    say(with_pool(name, run), f"{name} has {slots} slots", as_json)


def key(
    name: Name,
    key: Key,
    release: Annotated[bool, typer.Option("--release", help="Quarantined: have the pool's rule asked again, now.")] = False,
    as_json: AsJson = False,
) -> None:
    """A key: its slot, who has it, what runs, what waits and for what; since when it is paused or quarantined."""

    async def read(pool: BackendPool) -> KeyState:
        if release:
            await pool.release_key(key)
        return await pool.state(key)

    state = with_pool(name, read)
    if as_json:
        print_json(state)
        return
    shown = [(field, value) for field, value in asdict(state).items() if field not in ("key", "running", "why", "next_job")]
    shown += [("running", f"job {job.id}, attempt {job.attempt}, on {job.worker}") for job in state.running]
    print_table(["key", key], shown, empty="")
    if state.why is not None:
        out.print(f"job {state.next_job} waits: {state.why}", highlight=False, markup=False)


def jobs(
    name: Name,
    key: Annotated[str | None, typer.Option(help="Only jobs of this key.")] = None,
    after: Annotated[str | None, typer.Option(metavar="CURSOR", help="Only jobs behind this one.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="How many at most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """The jobs of a pool that wait or run, by key and in order; last those that are deferred."""
    found = with_pool(name, lambda pool: pool.list(key=key, after=after, limit=limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ["id", "key", "status", "attempt", "run after", "started", "worker"],
        [(j.id, j.key, j.status, f"{j.attempt} of {j.max_attempts}", j.run_after, j.started_at, j.worker) for j in found],
        empty="no jobs",
    )
    if len(found) == limit:
        out.print(f"more: --after {shlex.quote(found[-1].cursor)}", highlight=False, markup=False)


def pause_key(name: Name, key: Key, as_json: AsJson = False) -> None:
    """Let the jobs of a key wait; running ones go on, and those of other keys."""
    since = with_pool(name, lambda pool: pool.pause_key(key))
    say({"key": key, "paused_at": since}, f"paused: {key}", as_json)


def resume_key(name: Name, key: Key, as_json: AsJson = False) -> None:
    """End the pause of a key."""
    was_paused = with_pool(name, lambda pool: pool.resume_key(key))
    say({"key": key, "paused_at": None}, f"resumed: {key}" if was_paused else f"was not paused: {key}", as_json)


def keys(
    name: Name,
    quarantined: Annotated[bool, typer.Option("--quarantined", help="Those for which the pool's rule fails.")] = False,
    paused: Annotated[bool, typer.Option("--paused", help="Those that are paused.")] = False,
    after: Annotated[str | None, typer.Option(help="Only keys behind this one.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="How many at most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Keys whose jobs wait: those that are quarantined, since the pool's rule fails for them (the default), or paused."""
    if quarantined and paused:
        raise typer.BadParameter("give --quarantined or --paused")

    async def read(pool: BackendPool) -> list[dict[str, Any]]:
        if paused:
            return [asdict(key) for key in await pool.paused_keys(after=after, limit=limit)]
        return [asdict(key) for key in await pool.quarantined_keys(after=after, limit=limit)]

    found = with_pool(name, read)
    if as_json:
        print_json(found)
    else:
        empty = "no key is paused" if paused else "no key is quarantined"
        print_table(list(found[0]) if found else [], [list(key.values()) for key in found], empty=empty)


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

    say({"weights": with_pool(name, work)}, f"{key} gets {weight} jobs a turn", as_json)


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
