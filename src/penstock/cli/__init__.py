"""The command line. A file for each noun; what they share is in `output.py`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from penstock._version import __version__
from penstock.cli import (
    bulk,
    doctor,
    enqueueing,
    fleet,
    gearman,
    history,
    http,
    jobs,
    keys,
    leaders,
    operations,
    schedules,
    serving,
    standing,
    streams,
    topics,
    types,
    workers,
)
from penstock.cli.output import err
from penstock.core import logs
from penstock.errors import DatabaseUnavailable, PenstockError

app = typer.Typer(
    name="penstock",
    help="Background work on PostgreSQL: enqueue, work, look and steer.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
serving.add_to(app)
doctor.add_to(app)
enqueueing.add_to(app)
types.add_to(app)
gearman.add_to(app)
http.add_to(app)
standing.add_to(app)
leaders.add_to(app)
app.add_typer(jobs.app, name="jobs")
app.add_typer(operations.app, name="operations")
app.add_typer(history.app, name="history")
app.add_typer(bulk.app, name="bulk")
app.add_typer(fleet.app, name="fleet")
app.add_typer(workers.app, name="workers")
app.add_typer(schedules.app, name="schedules")
app.add_typer(streams.app, name="streams")
app.add_typer(topics.app, name="topics")
app.add_typer(keys.app, name="keys")


_CONFIGURE_THEMSELVES = {"worker", "up", "dequeue", "gearman", "server"}


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
    logs.hook_in()
    try:
        app()
    except DatabaseUnavailable as error:
        err.print(f"[red]error:[/red] {error.message}", highlight=False)
        if error.hint:
            err.print(error.hint, highlight=False)
        sys.exit(3)
    except PenstockError as error:
        err.print("[red]error:[/red] ", end="")
        # A handler's words may be a payload, and this may be the log of a worker.
        hidden = error.foreign and not logs.payloads_shown()
        err.print(f"{type(error).__name__} in a handler" if hidden else error.message, markup=False, highlight=False)
        if error.hint:
            err.print(error.hint, markup=False, highlight=False)
        sys.exit(1)
    except Exception as error:
        # What the exception says may hold a payload or a password; PENSTOCK_LOG_PAYLOADS shows it.
        err.print("unexpected error:", style="red")
        err.print(logs.traceback_of(error), markup=False, highlight=False, soft_wrap=True)
        if not logs.payloads_shown():
            err.print("Set PENSTOCK_LOG_PAYLOADS=true to see its message, which may hold a payload.", highlight=False)
        sys.exit(1)
