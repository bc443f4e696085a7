"""Commands after a restore of the database: check, fence, lake. docs/restore.md says when to run which."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.app import Penstock
from penstock.cli.backend import with_database
from penstock.cli.output import AsJson, out, print_json, print_table, say
from penstock.history import lake_queries as lakes
from penstock.history.lake import known_lake

app = typer.Typer(help="After a restore of the database: what is ahead of it, and what to do.", no_args_is_help=True)
_AHEAD = 1


@app.command()
def check(
    checkpoints: Annotated[
        list[str] | None, typer.Option("--checkpoint", help="Checkpoint of a Spark query: folder or URI. May be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is ahead of the restored database, and change nothing. Exit code: 0 nothing is, 1 something is."""

    async def look(opened: Penstock) -> dict[str, Any]:
        database = await opened.database()
        found: dict[str, Any] = dict((await database.fetchrow("select * from penstock.restore_report()")).items())
        found["lakes"], found["checkpoints"] = [], []
        known = await lakes.lakes(database)
        if known or checkpoints:
            from penstock.spark import restored

            found["lakes"] = [asdict(await restored.look_at_lake(database, record)) for record in known]
            found["checkpoints"] = [asdict(await restored.look_at_checkpoint(database, place)) for place in checkpoints or ()]
        return found

    found = with_database(look)
    if as_json:
        print_json(found)
    else:
        _print(found)
    ahead = any(lake["ahead"] or lake["missing"] for lake in found["lakes"]) or any(one["ahead"] for one in found["checkpoints"])
    if found["unfenced"] or ahead:
        raise typer.Exit(_AHEAD)


@app.command()
def fence(
    nothing_lost: Annotated[
        bool, typer.Option("--nothing-lost", help="Only note the server: it was moved, upgraded or promoted, and lost nothing.")
    ] = False,
    pause: Annotated[bool, typer.Option(help="Pause the at_most_once types with waiting jobs, which may have run.")] = True,
    as_json: AsJson = False,
) -> None:
    """Refuse whatever was handed out after the time of the restore. Once, before workers, servers and producers start."""

    async def run(opened: Penstock) -> dict[str, Any]:
        database = await opened.database()
        row = await database.fetchrow("select * from penstock.fence_restored($1, $2)", nothing_lost, pause)
        return dict(row.items())

    done = with_database(run)
    paused = f"; paused: {', '.join(done['paused'])}" if done["paused"] else ""
    say(done, f"restore {done['number']} is noted; {done['jobs']} jobs were in progress{paused}", as_json)


@app.command("lake")
def cut_lake(name: Annotated[str, typer.Option("--name", help="Name of the lake.")] = "main", as_json: AsJson = False) -> None:
    """Bring a lake, and the checkpoint of its pipeline, back to the restored database. No pipeline may run."""

    async def run(opened: Penstock) -> Any:
        from penstock.spark import restored

        database = await opened.database()
        return await restored.cut_lake(database, await known_lake(database, name))

    state = with_database(run)
    taken = f"{len(state.ahead)} files with {state.jobs} jobs"
    say(asdict(state), f"{taken} taken from the lake {state.name}; it ends with batch {state.batch}", as_json)


def _print(found: dict[str, Any]) -> None:
    server = "another one, or another timeline, than was noted: penstock restore fence" if found["unfenced"] else "as noted"
    rows = [
        ("server", server),
        ("jobs in progress", f"{found['in_progress']}, which fence ends"),
        ("at_most_once types that wait", ", ".join(found["at_most_once"]) or "none"),
        ("schedules that are due", ", ".join(found["due_schedules"]) or "none"),
        ("producers with numbers", ", ".join(found["producers"]) or "none"),
    ]  # fmt: skip
    for lake in found["lakes"]:
        what = "nothing is ahead"
        if lake["ahead"] or lake["missing"]:
            again = ", ".join(f"{jobs} of {type}" for type, jobs in lake["again"].items()) or "none"
            ahead, missing = len(lake["ahead"]), len(lake["missing"])
            what = (
                f"{ahead} files with {lake['jobs']} jobs are ahead, {missing} were replaced: penstock restore lake --name"
                f" {lake['name']}. Of these jobs wait, and will run again: {again}; unknown to the database: {lake['unknown']}"
            )
        rows.append((f"lake {lake['name']}", what))
    for one in found["checkpoints"]:
        rows.append((f"checkpoint {one['uri']}", "; ".join(one["ahead"]) or "nothing is ahead"))
    print_table(["", ""], rows, empty="")
    for one in found["checkpoints"]:
        if one["ahead"] and one["ends"]:
            out.print("Start its query with a new checkpoint, and startingOffsets:", highlight=False)
            out.print_json(data=one["ends"])
