"""Commands about fleets: status and drain. `penstock worker --on spark` starts one."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.backend import with_backend
from penstock.cli.output import AsJson, out, print_json, print_table

app = typer.Typer(help="Fleets of workers on Spark: status, drain.", no_args_is_help=True)


@app.command()
def status(as_json: AsJson = False) -> None:
    """Fleets, and how many of their workers are there."""
    found = with_backend(lambda backend: backend.fleets())
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
    with_backend(lambda backend: backend.drain_fleet(name))
    out.print(f"draining: {name}", highlight=False)
