"""Commands about the queries that write to Penstock: penstock streams writers list, takeover, forget."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypeVar

import orjson
import typer

from penstock.cli.backend import with_database
from penstock.cli.output import AsJson, out, print_json, print_table, say
from penstock.errors import NotFound

if TYPE_CHECKING:
    from penstock.app import Penstock
    from penstock.postgres.database import Database

T = TypeVar("T")
app = typer.Typer(help="Spark queries that write to Penstock, by the names under which they write.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help='Name of the writer: its option writer, or "query ID".')]


@app.command("list")
def list_writers(as_json: AsJson = False) -> None:
    """The writers of this database role: what each has written last to each target."""
    from penstock.spark import staging

    found = _with(staging.known_writers)
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        rows = [[one.writer, one.target, one.query, one.epoch, one.rows, one.committed_at, one.handed_over] for one in found]
        print_table(["writer", "target", "query", "batch", "rows", "committed_at", "handed_over"], rows, empty="no writers yet")


@app.command()
def takeover(
    name: Name,
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint of the old query, folder or URI, for positions that are not recorded.")
    ] = None,
    repeat: Annotated[
        bool, typer.Option("--repeat", help="When the targets stand at different batches, write later ones again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Hand the name of a query over to a new one with a new checkpoint, and print where that has to begin.

    Stop the old query first; it is refused from now on. May be repeated until the new query has written.
    """
    from penstock.spark import takeover as taking

    found = _with(lambda database: taking.take_over(database, name, checkpoint=checkpoint, repeat=repeat))
    if as_json:
        print_json(asdict(found))
        return
    out.print(
        f"{name}: the query {found.query} ended with batch {found.batch}, and is refused from now on. Start the new one with a"
        " new checkpoint, the same writer, and for each source, in their order, startingOffsets:",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    for position in found.starting:
        # On one line each, so that it can be copied.
        typer.echo("earliest" if position is None else orjson.dumps(position).decode())
    if found.again:
        out.print(f"Later batches are written again to {', '.join(found.again)}.", highlight=False, markup=False, soft_wrap=True)


@app.command()
def forget(name: Name, as_json: AsJson = False) -> None:
    """Forget what was written under a name: the next query that writes under it writes everything that it reads."""
    from penstock.spark import staging

    targets = _with(lambda database: staging.forget(database, name))
    if not targets:
        raise NotFound(
            f"no query of this role writes under the name {name}", hint="penstock streams writers list shows the names."
        )
    say({"forgotten": targets}, f"forgotten: {name}, {targets} targets", as_json)


def _with(work: Callable[[Database], Awaitable[T]]) -> T:
    async def run(opened: Penstock) -> T:
        return await work(await opened.database())

    return with_database(run)
