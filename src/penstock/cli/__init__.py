"""The command line. A file for each noun, which is imported when one of its commands is called (`lazy.py`); what they share is in
`output.py`.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from penstock._version import __version__
from penstock.cli.lazy import LazyGroup
from penstock.core.garbage_collection import collect_seldom
from penstock.errors import DatabaseUnavailable, PenstockError

app = typer.Typer(
    name="penstock",
    cls=LazyGroup,
    help="Background work on PostgreSQL: enqueue, work, look and steer.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
_CONFIGURE_THEMSELVES = {"worker", "up", "dequeue", "gearman", "server", "dashboard"}


@app.callback()
def choose(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", envvar="PENSTOCK_SERVER_URL",
            help="Work through an HTTP server instead of the database; its token from PENSTOCK_SERVER_TOKEN.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Background work on PostgreSQL: enqueue, work, look and steer."""
    from penstock.core import logs

    logs.hook_in()
    if context.invoked_subcommand not in _CONFIGURE_THEMSELVES:
        # What a command answers is on standard output.
        logs.configure(output=2)
    if server is not None:
        source = context.get_parameter_source("server")
        if source is not None and source.name == "COMMANDLINE" and "@" in server:
            raise typer.BadParameter(
                "every user of this machine sees its password in the list of processes: set PENSTOCK_SERVER_TOKEN",
                param_hint="--server",
            )
        os.environ["PENSTOCK_SERVER_URL"] = server


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 database not available."""
    # What a command imports lives on: a collection for each 700 new objects would find nothing, and take a tenth of a start.
    collect_seldom()
    try:
        app()
    except Exception as error:
        sys.exit(_failed(error))


def _failed(error: Exception) -> int:
    """Say what went wrong. Returns the exit code."""
    from penstock.cli.output import err
    from penstock.core import logs

    if isinstance(error, DatabaseUnavailable):
        err.print("[red]error:[/red] ", end="")
        err.print(error.message, markup=False, highlight=False)
        if error.hint:
            err.print(error.hint, markup=False, highlight=False)
        return 3
    if isinstance(error, PenstockError):
        err.print("[red]error:[/red] ", end="")
        # A handler's words may be a payload, and this may be the log of a worker.
        hidden = error.foreign and not logs.payloads_shown()
        err.print(f"{type(error).__name__} in a handler" if hidden else error.message, markup=False, highlight=False)
        if error.hint:
            err.print(error.hint, markup=False, highlight=False)
        return 1
    # What the exception says may hold a payload or a password; PENSTOCK_LOG_PAYLOADS shows it.
    err.print("unexpected error:", style="red")
    err.print(logs.traceback_of(error), markup=False, highlight=False, soft_wrap=True)
    if not logs.payloads_shown():
        err.print("Set PENSTOCK_LOG_PAYLOADS=true to see its message, which may hold a payload.", highlight=False)
    return 1
