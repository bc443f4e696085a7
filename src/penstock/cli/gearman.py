"""The command that bridges to Gearman."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Annotated

import typer

from penstock.cli.backend import database_app
from penstock.cli.observing import Log, Metrics, check_log, measured_at, metrics_address
from penstock.cli.output import out
from penstock.core import logs
from penstock.worker.worker import stop_on


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(gearman)


def gearman(
    server: Annotated[list[str], typer.Option("--server", "-s", metavar="HOST:PORT", help="A gearmand; may be repeated.")],
    name: Annotated[str, typer.Option(help="Queue of the copies; bridges to the same gearmands share it.")] = "gearman",
    expose: Annotated[list[str] | None, typer.Option(help="Offer this job type as a Gearman function; may be repeated.")] = None,
    forward: Annotated[list[str] | None, typer.Option(help="Let Gearman workers run this job type; may be repeated.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds that a foreground fan-out waits.")] = 30,
    metrics: Metrics = None,
    log_format: Log = "console",
) -> None:
    """Serve subscribe_fanout, unsubscribe_fanout and fanout on gearmands until SIGTERM or Ctrl-C."""
    from penstock.integrations.gearman.bridge import Bridge
    from penstock.integrations.gearman.wire import Server

    check_log(log_format)
    address = metrics_address(metrics)
    logs.configure(log_format)

    async def run() -> None:
        app = database_app()
        bridge: Bridge | None = None
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(measured_at(app, address, lambda: bridge.workers if bridge else []))
            await app.open(timeout=app.settings.start_timeout)
            await stack.enter_async_context(app)
            app.context.settings = app.settings.model_copy(update={"concurrency": max(app.settings.concurrency, 1_000)})
            bridge = Bridge(
                app,
                [Server.parse(text) for text in server],
                name=name,
                expose=expose or [],
                forward=forward or [],
                timeout=timedelta(seconds=timeout),
            )
            stop_on(bridge.stop, asyncio.get_running_loop())
            await bridge.run()

    asyncio.run(run())
    out.print("stopped")
