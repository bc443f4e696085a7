"""Commands about HTTP: server, dequeue, users."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.backend import database_app, require_database, with_database
from penstock.cli.observing import Log, Metrics, check_log, measured_at, metrics_address
from penstock.cli.output import AsJson, err, opened, out, print_json, print_table
from penstock.core import logs
from penstock.errors import InvalidInput, PenstockError

_STOPS_WITHIN_S = 30.0
users = typer.Typer(help="Users of the HTTP API: list, add, remove.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(server)
    app.command()(dashboard)
    app.command()(dequeue)
    app.add_typer(users, name="users")


def server(
    host: Annotated[str | None, typer.Option(help="Address to listen on; elsewhere than on loopback users are needed.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", min=0, max=65535, help="0: any free one.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, max=256, help="Server processes.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json.")] = None,
) -> None:
    """Serve the HTTP API and the dashboard until SIGTERM or Ctrl-C."""
    require_database()
    _serve({"host": host, "port": port, "processes": processes, "log_format": log_format})


def dashboard(
    host: Annotated[str | None, typer.Option(help="Address to listen on; elsewhere than on loopback users are needed.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", min=0, max=65535, help="0: any free one.")] = None,
) -> None:
    """Serve the dashboard alone, without the HTTP API, until SIGTERM or Ctrl-C."""
    require_database()
    _serve({"host": host, "port": port}, only_dashboard=True)


@contextmanager
def serving_beside(**given: Any) -> Iterator[None]:
    """Serve the HTTP API in a process of its own, which ends here, and with this process."""
    process = multiprocessing.get_context("spawn").Process(
        target=logs.guarded, args=(_serve_or_say, given), name="penstock-server"
    )
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join(_STOPS_WITHIN_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve_or_say(given: dict[str, Any]) -> None:
    try:
        _serve(given)
    except PenstockError as error:
        err.print("[red]error:[/red] ", end="")
        err.print(f"the HTTP API is not served: {error.message}", markup=False, highlight=False)
        sys.exit(1)


def _serve(given: dict[str, Any], *, only_dashboard: bool = False) -> None:
    from penstock.http import HttpSettings, serve

    settings = HttpSettings.read(**{name: value for name, value in given.items() if value is not None})
    serve(settings, typer.echo, only_dashboard=only_dashboard)


def dequeue(
    downstream_url: Annotated[str | None, typer.Option(help="The service that does the work; or DOWNSTREAM_URL.")] = None,
    names: Annotated[list[str] | None, typer.Option("--type", "-t", help="Only this job type; may be repeated.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Most jobs in flight of this process.")] = None,
    metrics: Metrics = None,
    log_format: Log = "console",
) -> None:
    """Send jobs to a downstream service and wait for its callbacks, until SIGTERM or Ctrl-C.

    The password of its user jobs comes from DOWNSTREAM_WORKER_AUTH.
    """
    from penstock.integrations.rickover.downstream import DownstreamWorker
    from penstock.integrations.rickover.service import DownstreamSettings
    from penstock.postgres.rights import takes_part_as
    from penstock.worker.worker import stop_on

    takes_part_as("worker")
    require_database()
    check_log(log_format)
    address = metrics_address(metrics)
    given = {"url": downstream_url, "concurrency": concurrency}
    settings = DownstreamSettings.read(**{name: value for name, value in given.items() if value is not None})
    settings.require_url()
    if not settings.password.get_secret_value():
        err.print("DOWNSTREAM_WORKER_AUTH is not set: the service is called with an empty password", style="yellow")

    logs.configure(log_format)
    logs.show_payloads(settings.debug_traffic or logs.payloads_shown())

    async def run() -> None:
        app = database_app()
        # Rickover's dequeuer gives what runs ten seconds.
        update: dict[str, Any] = {"pool_size": settings.pool_size}
        if "shutdown_grace" not in app.settings.model_fields_set:
            update["shutdown_grace"] = timedelta(seconds=10)
        app.context.settings = app.settings.model_copy(update=update)
        workers: list[DownstreamWorker] = []
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(measured_at(app, address, lambda: workers))
            await app.open(timeout=app.settings.start_timeout)
            await stack.enter_async_context(app)
            worker = DownstreamWorker(await app.database(), app.settings, settings, names or [])
            workers.append(worker)
            stop_on(worker.stop, asyncio.get_running_loop())
            await worker.run()

    if sys.platform == "win32":
        asyncio.run(run())
    else:
        import uvloop

        uvloop.run(run())


@users.command("add")
def add_user(
    name: Annotated[str, typer.Argument(help="Letters, digits, - and _.")],
    password: Annotated[str | None, typer.Option(hidden=True)] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(help="File with its password, - for standard input; or PENSTOCK_USER_PASSWORD; none: one is made."),
    ] = None,
    ask: Annotated[bool, typer.Option("--ask", help="Ask for its password.")] = False,
    role: Annotated[str, typer.Option(help="read, enqueue, work or admin; each includes the ones before.")] = "enqueue",
    types: Annotated[list[str] | None, typer.Option("--type", "-t", help="Only this job type; may be repeated.")] = None,
    replace: Annotated[bool, typer.Option(help="Change the user when it exists.")] = False,
) -> None:
    """Add a user of the HTTP API."""
    from penstock.app import Penstock
    from penstock.http import user_queries as table
    from penstock.http.users import hash_secret, new_secret

    require_database()
    if password is not None:
        raise typer.BadParameter(
            "every user of this machine sees it in the list of processes: use --password-file, --ask or PENSTOCK_USER_PASSWORD",
            param_hint="--password",
        )
    given = _password(name, password_file, ask)
    secret = given if given is not None else new_secret()
    hashed = hash_secret(secret)

    async def run(app: Penstock) -> None:
        await table.add_user(await app.database(), name, role, hashed, types or None, replace=replace)

    with_database(run)
    out.print(f"added: {name} ({role})", highlight=False)
    if given is None:
        out.print(f"password: {secret}\ntoken:    {name}.{secret}", highlight=False, soft_wrap=True)


def _password(name: str, file: Path | None, ask: bool) -> str | None:
    """The password that is given; None: one is to be made."""
    if ask:
        return str(typer.prompt(f"password of {name}", hide_input=True, confirmation_prompt=True))
    if file is None:
        return os.environ.get("PENSTOCK_USER_PASSWORD") or None
    with opened(file) as source:
        try:
            return source.read(4096).decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise InvalidInput(f"the password in {file} is not UTF-8 text") from None


@users.command("list")
def list_users(as_json: AsJson = False) -> None:
    """List the users."""
    from penstock.app import Penstock
    from penstock.http import user_queries as table

    async def run(app: Penstock) -> list[table.UserRecord]:
        return await table.list_users(await app.database())

    found = with_database(run)
    if as_json:
        print_json(found)
        return
    rows = [(user.name, user.role, ", ".join(user.types) if user.types else "all", user.created_at) for user in found]
    print_table(["name", "role", "job types", "added"], rows, empty="no users yet")


@users.command("remove")
def remove_user(name: Annotated[str, typer.Argument(help="The user.")]) -> None:
    """Remove a user; servers refuse it within seconds."""
    from penstock.app import Penstock
    from penstock.http import user_queries as table

    async def run(app: Penstock) -> None:
        await table.remove_user(await app.database(), name)

    with_database(run)
    out.print(f"removed: {name}", highlight=False)
