"""Commands that run something: up, worker, migrate."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

import typer

from penstock.app import Penstock, load
from penstock.cli.autoscale import Autoscaler, parse_range
from penstock.cli.backend import database_app, require_database
from penstock.cli.http import serving_beside
from penstock.cli.observing import Log, Metrics, check_log, measured_at, metrics_address
from penstock.cli.output import AsJson, err, holding, out, print_json, say
from penstock.cli.replacing import MaxJobs, MaxMemory, ReplaceAfter, replace_after
from penstock.cli.times import span
from penstock.cli.worker_ends import EndedProcesses
from penstock.cli.worker_processes import Told, supervise
from penstock.core import logs
from penstock.core.garbage_collection import collect_seldom
from penstock.core.logs import get_logger
from penstock.core.measuring import measured
from penstock.errors import InvalidInput, SchemaMismatch
from penstock.pools.service import new_member_id
from penstock.postgres.credentials import with_password
from penstock.postgres.embedded import wheel_bin_dir
from penstock.postgres.migrate import MigrationPlan
from penstock.postgres.rights import takes_part_as
from penstock.worker import Worker, retention
from penstock.worker.handler_calls import HANDLER_THREADS
from penstock.worker.worker import stop_on

log = get_logger("penstock.worker")
_LAST_WAIT_S = 1.0
Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the app is, such as shop.jobs:app.")]
Processes = Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")]
Names = Annotated[list[str] | None, typer.Option("--type", "-t", help="Only this job type; may be repeated.")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Async handlers at once in a process.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(up)
    app.command()(worker)
    app.command()(migrate)
    app.command()(declare)
    app.command("exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(execute)


def worker(
    target: Target,
    processes: Processes = 1,
    names: Names = None,
    concurrency: Concurrency = None,
    metrics: Metrics = None,
    log_format: Log = "console",
    max_jobs: MaxJobs = None,
    max_memory: MaxMemory = None,
    reload: Annotated[bool, typer.Option("--reload", help="Start again when a Python file below this folder changes.")] = False,
    autoscale: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="As many processes as `penstock scale advise` says, within these.")
    ] = None,
    wait: Annotated[str, typer.Option(help="How long a job should wait at most, with --autoscale: 5s, 1m.")] = "5s",
    on: Annotated[str, typer.Option(help="here, or spark: on the executors of a Spark cluster.")] = "here",
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="Workers of the fleet, with --on spark.")] = 1,
    master: Annotated[str | None, typer.Option(help="The cluster, with --on spark; default: local[WORKERS].")] = None,
    fleet: Annotated[str | None, typer.Option(help="Name of the fleet, with --on spark.")] = None,
    ship: Annotated[Path | None, typer.Option(help="Folder with modules for the executors, with --on spark.")] = None,
) -> None:
    """Run jobs until SIGTERM or Ctrl-C; a second signal stops at once. With --on spark: penstock fleet drain."""
    require_database()
    app = load(target)
    for name in names or []:
        if name not in app.consumers:
            app.with_handler(name)
    check_log(log_format)
    limits = None if autoscale is None else parse_range(autoscale)
    if limits is not None and (processes != 1 or on != "here"):
        raise typer.BadParameter("goes with neither --processes nor --on spark", param_hint="--autoscale")
    if on not in ("here", "spark"):
        raise typer.BadParameter(f"{on!r} is neither here nor spark", param_hint="--on")
    address = metrics_address(metrics)
    if on == "spark":
        logs.configure(log_format)
        _on_spark(app, target, names or [], concurrency, workers, master, fleet, ship, address, log_format)
        return
    command = WorkerCommand(target, tuple(names or ()), concurrency, log_format, replace_after(max_jobs, max_memory))
    supervised = limits is not None or command.replace_after is not None or reload
    if processes == 1 and not supervised:
        run_worker(command, metrics=address)
        return
    scaler = None if limits is None else Autoscaler(lambda: load(target), names or [], *limits, span(wait), app.settings)
    number = processes if limits is None else limits[0]
    wanted = None if scaler is None else scaler.wanted
    changed = None
    if reload:
        from penstock.cli.reloading import SourceChanges

        changed = SourceChanges(Path.cwd()).seen
    if address is None:
        _supervise(app, command, number, wanted, changed=changed)
    else:
        logs.configure(log_format)
        # Loaded here, since the library takes a while to load.
        from penstock.cli import worker_metrics

        with worker_metrics.of_processes(app, address, number) as reports:
            _supervise(app, command, number, wanted, reports.pipe, changed)


def up(
    target: Annotated[str | None, typer.Argument(metavar="[MODULE:APP]", help="Work for this app too.")] = None,
    processes: Processes = 1,
    http: Annotated[bool, typer.Option("--http", help="Serve the HTTP API and the dashboard too.")] = False,
    port: Annotated[int | None, typer.Option("--port", "-p", min=0, max=65535, help="Of --http; 0: any free one.")] = None,
) -> None:
    """Run everything here: the database (embedded unless one is configured), its schema, a worker for an app, the HTTP API."""
    require_database()
    app = load(target) if target else Penstock()
    asyncio.run(_announce(app))
    with serving_beside(port=port) if http else nullcontext():
        if target is None:
            asyncio.run(_hold(app))
        elif processes == 1:
            run_worker(WorkerCommand(target))
        else:
            _supervise(app, WorkerCommand(target), processes)


def migrate(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
    as_sql: Annotated[bool, typer.Option("--sql", help="Print the statements for psql, and change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create the schema penstock in the database, or bring it to this version."""
    if as_sql and (as_json or dry_run):
        raise typer.BadParameter("it prints the statements alone: leave out --dry-run and --json", param_hint="--sql")

    async def run() -> Any:
        app = database_app()
        try:
            if dry_run or as_sql:
                return await app.plan_migration()
            migrated = await app.migrate()
            # With the rights of the owner, which workers need not have.
            await retention.store(await app.database(), app.settings)
            return migrated
        finally:
            await app.close()

    done = asyncio.run(run())
    if as_sql:
        typer.echo(done.script, nl=False)
    elif dry_run:
        _print_plan(done, as_json)
    elif as_json:
        print_json(done)
    elif done.tables or done.functions:
        out.print(f"migrated: {', '.join(done.tables) or 'no tables'}{', functions' if done.functions else ''}")
    else:
        out.print("nothing to do, the schema is up to date")


def _print_plan(plan: MigrationPlan, as_json: bool) -> None:
    changes = {field: getattr(plan, field) for field in ("tables", "created", "replaced", "dropped")}
    if as_json:
        print_json(changes)
    elif not plan.statements:
        out.print("nothing to do, the schema is up to date")
    else:
        for what, names in changes.items():
            kind = "tables, apply" if what == "tables" else f"functions, {what}"
            out.print(f"{kind}: {', '.join(names) or 'none'}", markup=False, highlight=False, soft_wrap=True)


def declare(target: Target, as_json: AsJson = False) -> None:
    """Write what an app declares into the database: job types, pools, topics, streams. For deploys; workers do it too."""
    require_database()
    app = load(target)

    async def run() -> list[str]:
        # Without the opening's own declarations, which put up with refusals.
        async with app:
            return await app.declare()

    declared = asyncio.run(run())
    say(declared, "\n".join(declared) or "the app declares nothing", as_json)


def execute(command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The program and its arguments.")]) -> None:
    """Run a command that finds the database in DATABASE_URL (and libpq's variables); the embedded server runs until it ends."""
    app = database_app()
    with holding(app):
        try:
            asyncio.run(app.migrate(timeout=app.settings.start_timeout))
        except SchemaMismatch as error:
            # The command may be there to look at what is in the database, to export it or to drop it.
            err.print(f"warning: {error}", markup=False, highlight=False, soft_wrap=True)
        url = with_password(app.database_url(), app.settings)
        environment = {**os.environ, "DATABASE_URL": url, "PENSTOCK_DATABASE_URL": url}
        if app.settings.database_url is None:
            parts = urlsplit(url)
            environment |= {
                "PGHOST": parse_qs(parts.query)["host"][0],
                "PGUSER": parts.username or "",
                "PGDATABASE": parts.path[1:],
            }
            # Those of another version may refuse the server.
            environment["PATH"] = os.pathsep.join([str(wheel_bin_dir()), os.environ.get("PATH", os.defpath)])
        # Ctrl-C is the command's to deal with.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            found = shutil.which(command[0], path=environment.get("PATH"))
            done = subprocess.Popen([found or command[0], *command[1:]], env=environment, preexec_fn=_default_interrupt)  # noqa: S603
        except OSError as error:
            raise InvalidInput(f"cannot run {command[0]}: {error.strerror}") from None
        code = done.wait()
    raise typer.Exit(code if code >= 0 else 128 - code)


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """What a worker process is told at its start.

    Attributes:
        target: Where the app is.
        names: Only these job types; none: all.
        concurrency: Async handlers at once; None: as set.
        log_format: "console" or "json".
        replace_after: When it asks its supervisor for a successor; None: never.
    """

    target: str
    names: tuple[str, ...] = ()
    concurrency: int | None = None
    log_format: str = "console"
    replace_after: ReplaceAfter | None = None


def run_worker(command: WorkerCommand, told: Told | None = None, *, metrics: tuple[str, int] | None = None) -> None:
    """Run one worker in this process until it is told to stop: by signals, or by its supervisor.

    Args:
        command: What to run.
        told: Its supervisor, which also gets its reports.
        metrics: Address to serve metrics at.
    """
    takes_part_as("worker")
    app = load(command.target)
    logs.configure(command.log_format)
    if command.concurrency is not None:
        app.context.settings = app.settings.model_copy(update={"concurrency": command.concurrency})
    collect_seldom()

    async def run() -> None:
        code = 1
        working: Worker | None = None
        try:
            async with AsyncExitStack() as stack:

                def workers() -> list[Worker]:
                    return [] if working is None else [working]

                if told is not None and told.reports is not None:
                    from penstock.cli import worker_metrics

                    meter = stack.enter_context(measured())
                    stack.enter_context(worker_metrics.reporting(told.reports, meter, workers))
                await stack.enter_async_context(measured_at(app, metrics, workers))
                await app.open(timeout=app.settings.start_timeout)
                await stack.enter_async_context(app)
                working = await app.worker(*command.names)
                if told is not None:
                    working.started_by(told.supervisor)
                _obey(working, told, asyncio.get_running_loop())
                if told is not None and command.replace_after is not None:
                    asking = asyncio.create_task(command.replace_after.ask(working, told.replace), name="penstock-replacing")
                    stack.callback(asking.cancel)
                await working.run()
            code = 0
        except Exception as error:
            if await _still_running():
                log.error("worker_failed", error=error)
            raise
        finally:
            if await _still_running():
                # Everything is settled. A thread cannot be ended, nor a task that swallows its cancellation: only the process.
                log.warning("handlers_do_not_stop", exit_code=code)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    if sys.platform == "win32":
        asyncio.run(run())
    else:
        import uvloop

        uvloop.run(run())


def _supervise(
    app: Penstock,
    command: WorkerCommand,
    processes: int,
    wanted: Callable[[int], int] | None = None,
    reports: Callable[[], Connection] | None = None,
    changed: Callable[[], bool] | None = None,
) -> None:
    """Keep worker processes running, and tell the database how they end. See `supervise`."""
    supervisor = new_member_id()
    # An application of its own, since that of the module may be open in another thread.
    ends = EndedProcesses(supervisor, lambda: Penstock(settings=app.settings))
    supervise(run_worker, (command,), processes, wanted, reports, changed, supervisor=supervisor, ended=ends.ended)


def _on_spark(
    app: Penstock,
    target: str,
    names: list[str],
    concurrency: int | None,
    workers: int,
    master: str | None,
    fleet: str | None,
    ship: Path | None,
    metrics: tuple[str, int] | None,
    log_format: str,
) -> None:
    from penstock.spark import fleet as fleets
    from penstock.spark import session

    async def url() -> str:
        async with app:
            return await app.start_server()

    found = asyncio.run(url())
    # A worker that fails is started again; and none is run twice because it seems slow.
    config = {"spark.task.maxFailures": "100000", "spark.speculation": "false", "spark.dynamicAllocation.enabled": "false"}
    chosen = master or f"local[{workers},100000]"
    with holding(app):
        spark = session(master=chosen, app_name=f"penstock workers {target}", config=config)
        fleets.run(
            spark, found, target, workers=workers, fleet=fleet, names=names, concurrency=concurrency, ship=ship,
            metrics=metrics, log_format=log_format,
        )  # fmt: skip
        spark.stop()


def _obey(working: Worker, told: Told | None, loop: asyncio.AbstractEventLoop) -> None:
    if told is None:
        stop_on(working.stop, loop)
    else:
        told.obey(working, loop)


async def _still_running() -> bool:
    """Whether tasks or handlers' threads go on after they were told to end and had a second for it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks and (await asyncio.wait(tasks, timeout=_LAST_WAIT_S))[1]:
        return True
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(HANDLER_THREADS)]
    until = time.monotonic() + _LAST_WAIT_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return any(thread.is_alive() for thread in threads)


async def _announce(app: Penstock) -> None:
    url = await app.start_server()
    await app.migrate(timeout=app.settings.start_timeout)
    shown = url if app.settings.database_url is None else "the configured PostgreSQL"
    out.print(f"database: {shown}", highlight=False, soft_wrap=True)


async def _hold(app: Penstock) -> None:
    async with app:
        stopped = asyncio.Event()
        stop_on(stopped.set, asyncio.get_running_loop())
        out.print("running; stop with Ctrl-C")
        await stopped.wait()
