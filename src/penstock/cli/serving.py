"""Commands that run something: up, worker, migrate."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.app import Penstock
from penstock.cli.output import AsJson, holding, out, print_json
from penstock.errors import InvalidInput
from penstock.worker.worker import stop_on

Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the app is, such as shop.jobs:app.")]
Processes = Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")]
Names = Annotated[list[str] | None, typer.Option("--type", "-t", help="Only this job type; may be repeated.")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Async handlers at once in a process.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(up)
    app.command()(worker)
    app.command()(migrate)


def load(target: str) -> Penstock:
    """The app at MODULE:APP. Raises `InvalidInput` when it is not there."""
    module_name, _, attribute = target.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise InvalidInput(f"there is no module {module_name}", hint="Give MODULE:APP, as seen from this folder.") from None
    found = getattr(module, attribute or "app", None)
    if not isinstance(found, Penstock):
        raise InvalidInput(f"{target} is not a Penstock app", hint="Give MODULE:APP, such as shop.jobs:app.")
    return found


def worker(
    target: Target,
    processes: Processes = 1,
    names: Names = None,
    concurrency: Concurrency = None,
    on: Annotated[str, typer.Option(help="here, or spark: on the executors of a Spark cluster.")] = "here",
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="Workers of the fleet, with --on spark.")] = 1,
    master: Annotated[str | None, typer.Option(help="The cluster, with --on spark; default: local[WORKERS].")] = None,
    fleet: Annotated[str | None, typer.Option(help="Name of the fleet, with --on spark.")] = None,
    ship: Annotated[Path | None, typer.Option(help="Folder with modules for the executors, with --on spark.")] = None,
) -> None:
    """Run jobs until SIGTERM or Ctrl-C; a second signal stops at once. With --on spark: penstock fleet drain."""
    app = load(target)
    for name in names or []:
        app.with_handler(name)
    if on == "spark":
        _on_spark(app, target, names or [], concurrency, workers, master, fleet, ship)
        return
    if on != "here":
        raise typer.BadParameter(f"{on!r} is neither here nor spark", param_hint="--on")
    if processes == 1:
        run_worker(target, names or [], concurrency)
    else:
        sys.exit(_supervise(target, names or [], concurrency, processes))


def up(
    target: Annotated[str | None, typer.Argument(metavar="[MODULE:APP]", help="Work for this app too.")] = None,
    processes: Processes = 1,
) -> None:
    """Run everything here: the database (embedded unless one is configured), its schema, and a worker for an app."""
    app = load(target) if target else Penstock()
    asyncio.run(_announce(app))
    if target is None:
        asyncio.run(_hold(app))
    elif processes == 1:
        run_worker(target, [], None)
    else:
        sys.exit(_supervise(target, [], None, processes))


def migrate(as_json: AsJson = False) -> None:
    """Create the schema penstock in the database, or bring it to this version."""

    async def run() -> Any:
        app = Penstock()
        try:
            return await app.migrate()
        finally:
            await app.close()

    done = asyncio.run(run())
    if as_json:
        print_json(done)
    elif done.tables or done.functions:
        out.print(f"migrated: {', '.join(done.tables) or 'no tables'}{', functions' if done.functions else ''}")
    else:
        out.print("nothing to do, the schema is up to date")


def run_worker(target: str, names: list[str], concurrency: int | None) -> None:
    """Run one worker in this process until it is told to stop."""
    app = load(target)
    if concurrency is not None:
        app.settings = app.settings.model_copy(update={"concurrency": concurrency})

    async def run() -> None:
        async with app:
            working = await app.worker(*names)
            stop_on(working.stop, asyncio.get_running_loop())
            _stop_with_parent(working.stop, asyncio.get_running_loop())
            await working.run()

    if sys.platform == "win32":
        asyncio.run(run())
    else:
        import uvloop

        uvloop.run(run())


def _on_spark(
    app: Penstock,
    target: str,
    names: list[str],
    concurrency: int | None,
    workers: int,
    master: str | None,
    fleet: str | None,
    ship: Path | None,
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
        fleets.run(spark, found, target, workers=workers, fleet=fleet, names=names, concurrency=concurrency, ship=ship)
        spark.stop()


def _stop_with_parent(stop: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    """Stop when the process that supervises this one is gone, also when it was killed."""
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform == "win32":
        return

    def gone() -> None:
        loop.remove_reader(parent.sentinel)
        stop()

    loop.add_reader(parent.sentinel, gone)


def _supervise(target: str, names: list[str], concurrency: int | None, processes: int) -> int:
    """Keep some worker processes running; one that dies is started again, at most once a second each."""
    spawn = multiprocessing.get_context("spawn")
    signals = 0

    def forward(number: int, _frame: Any) -> None:
        nonlocal signals
        signals += 1
        for child in children:
            if child.pid is not None and child.is_alive():
                os.kill(child.pid, signal.SIGTERM)

    def start() -> Any:
        child = spawn.Process(target=run_worker, args=(target, names, concurrency), name="penstock-worker")
        child.start()
        return child

    children: list[Any] = [start() for _ in range(processes)]
    started = [time.monotonic()] * processes
    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    while not signals:
        multiprocessing.connection.wait([child.sentinel for child in children], timeout=1.0)
        for place, child in enumerate(children):
            if not signals and not child.is_alive() and time.monotonic() - started[place] > 1.0:
                children[place] = start()
                started[place] = time.monotonic()
    for child in children:
        child.join()
    return 0


async def _announce(app: Penstock) -> None:
    url = await app.start_server()
    await app.migrate()
    shown = url if app.settings.database_url is None else "the configured PostgreSQL"
    out.print(f"database: {shown}", highlight=False, soft_wrap=True)


async def _hold(app: Penstock) -> None:
    async with app:
        stopped = asyncio.Event()
        stop_on(stopped.set, asyncio.get_running_loop())
        out.print("running; stop with Ctrl-C")
        await stopped.wait()
