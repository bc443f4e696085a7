"""`penstock top`: the overview of the dashboard in a terminal, and what fills the queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.backend import Backend, with_backend
from penstock.cli.output import AsJson, out, pass_on_json, print_json, print_table
from penstock.core.spending import spending
from penstock.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from penstock.worker.overview import Overview

app = typer.Typer(help="How everything is doing, live; and what fills the queue: types, keys.", invoke_without_command=True)
_EVERY_S = 3.0
# What is dear to read is read seldom: it takes at most a hundredth of a processor of the database. A server paces its readings.
_SHARE = 100.0
_LONGEST_S = 300.0
_SHOWN = 15
Order = Annotated[
    str,
    typer.Option(
        "--order",
        help="ready: most ready jobs first; oldest: the longest wait first; busy: most finished jobs in the last hour first.",
    ),
]
Type = Annotated[str | None, typer.Option("--type", help="Only this job type.")]
Limit = Annotated[int, typer.Option("--limit", "-n", help="Most lines: 1 to 1000.")]


@app.callback(invoke_without_command=True)
def overview(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """How everything is doing, live; and what fills the queue: types, keys."""
    if pass_on_json(context, as_json):
        return
    if context.invoked_subcommand is not None:
        return
    if as_json:
        print_json(with_backend(lambda backend: backend.overview()))
    elif once or not out.is_terminal:
        from penstock.cli.overview import screen

        found = with_backend(lambda backend: backend.overview())
        out.print(screen(found, _SHOWN))
    else:
        try:
            with_backend(_follow)
        except KeyboardInterrupt:
            return


async def _follow(backend: Backend) -> None:
    """Show the overview until Ctrl-C."""
    from rich.live import Live

    from penstock.cli.overview import screen

    found: Overview | None = None
    with Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            problem = ""
            with spending() as spent:
                try:
                    found = await backend.overview()
                except DatabaseUnavailable as error:
                    problem = error.message
            if found is not None or problem:
                live.update(screen(found, max(out.height - 16, 3), problem), refresh=True)
            await asyncio.sleep(pause_after(spent.cost_s, failed=bool(problem)))


def pause_after(cost_s: float, *, failed: bool) -> float:
    """For how many seconds the overview stays as it is. `failed`: it could not be read, whatever that cost."""
    return _EVERY_S if failed else max(_EVERY_S, min(_SHARE * cost_s, _LONGEST_S))


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
