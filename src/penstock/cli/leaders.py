"""Commands about the tasks of the leader."""

from __future__ import annotations

import typer

from penstock.cli.backend import with_backend
from penstock.cli.output import AsJson, print_json, print_table


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(leaders)


def leaders(as_json: AsJson = False) -> None:
    """Tasks that one worker of all runs: which one, since when, and their errors."""
    found = with_backend(lambda app: app.leaders())
    if as_json:
        print_json(found)
        return
    print_table(
        ["task", "state", "leader", "epoch", "since", "candidates", "failures", "last error"],
        [(t.name, t.state, t.leader, t.epoch, t.leads_since, t.candidates, t.failures, t.last_error) for t in found],
        empty="no tasks of the leader yet",
    )
