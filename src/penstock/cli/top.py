"""`penstock top`: what fills the queue."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.backend import with_backend
from penstock.cli.output import AsJson, out, print_json, print_table

app = typer.Typer(help="What fills the queue: types, keys.", no_args_is_help=True)
Order = Annotated[
    str,
    typer.Option(
        "--order",
        help="ready: most ready jobs first; oldest: the longest wait first; busy: most finished jobs in the last hour first.",
    ),
]
Type = Annotated[str | None, typer.Option("--type", help="Only this job type.")]
Limit = Annotated[int, typer.Option("--limit", "-n", help="Most lines: 1 to 1000.")]


@app.command()
def types(order: Order = "ready", type: Type = None, limit: Limit = 20, as_json: AsJson = False) -> None:
    """The job types that fill the queue."""
    _print("types", order, type, limit, as_json)


@app.command()
def keys(order: Order = "ready", type: Type = None, limit: Limit = 20, as_json: AsJson = False) -> None:
    """The keys that fill the queue, such as tenants or accounts."""
    _print("keys", order, type, limit, as_json)


def _print(by: str, order: str, type: str | None, limit: int, as_json: bool) -> None:
    found = with_backend(lambda app: app.top(by, order=order, name=type, limit=limit))
    if as_json:
        print_json(found)
        return
    of_keys = by == "keys"
    print_table(
        ["type", *(["key"] if of_keys else []), "ready", "deferred", "in progress", "oldest ready", "finished"],
        [
            (
                t.name, *([t.key] if of_keys else []), t.ready, t.deferred, t.in_progress,
                None if t.oldest_ready_s is None else f"{t.oldest_ready_s:.0f} s", t.finished,
            )
            for t in found
        ],
        empty=f"no {by} with jobs",
    )  # fmt: skip
    if found and found[0].looked_at < 1:
        out.print(f"estimated from {found[0].looked_at:.1%} of the ready and running jobs", highlight=False)
