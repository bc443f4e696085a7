"""Commands about fleets: status and drain. `penstock worker --on spark` starts one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.app import Penstock
from penstock.cli.backend import with_database
from penstock.cli.output import AsJson, out, print_json, print_table
from penstock.worker import fleets

app = typer.Typer(help="Fleets of workers on Spark: status, drain.", no_args_is_help=True)


@app.command()
def status(as_json: AsJson = False) -> None:
    """Fleets, and how many of their workers are there."""

    async def gather(opened: Penstock) -> Any:
        return await fleets.fleets(await opened.database())

    found = with_database(gather)
    if as_json:
        print_json(found)
        return
    print_table(
        ["fleet", "app", "wanted", "present", "draining", "since"],
        [(fleet.name, fleet.target, fleet.wanted, fleet.present, fleet.draining, fleet.started_at) for fleet in found],
        empty="no fleets: penstock worker MODULE:APP --on spark",
    )


@app.command()
def drain(name: Annotated[str, typer.Argument(help="Name of the fleet.")]) -> None:
    """Let the workers of a fleet finish what they run, and end."""

    async def run(opened: Penstock) -> None:
        await fleets.drain(await opened.database(), name)

    with_database(run)
    out.print(f"draining: {name}", highlight=False)
