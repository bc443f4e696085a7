"""A fleet: workers on the executors of a Spark cluster.

Spark starts the workers, and starts them again after a failure. Apart from that they are ordinary workers: they claim, settle,
heartbeat and recover through Postgres. Spark ends Python with SIGKILL, which a handler cannot catch. A fleet is therefore
drained through Postgres: each worker reads the fleet's row in `fleets`, shuts down when the row asks for it, and then its task
ends. When Spark kills a worker nevertheless, its leases end and its jobs run again, as after any crash.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.app import load
from penstock.core import logs
from penstock.core.logs import get_logger
from penstock.core.measuring import measured
from penstock.errors import DatabaseUnavailable, MissingExtra, PenstockError
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.spark import fleet_metrics
from penstock.spark.blocking import Blocking
from penstock.spark.fleet_metrics import ReportsTo
from penstock.worker import fleets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.worker import Worker

log = get_logger("penstock.fleet")
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """The arguments of one worker of a fleet. Spark sends them to an executor.

    Attributes:
        fleet: Name of the fleet.
        url: URL of the database.
        target: The application, as `MODULE:APP`.
        names: Job types to run; none: all of the application.
        concurrency: Largest number of async handlers at once; None: the setting of the application.
        log_format: "console" or "json".
        reports_to: Where it reports its metrics; None: it measures nothing.
    """

    fleet: str
    url: str
    target: str
    names: tuple[str, ...] = ()
    concurrency: int | None = None
    log_format: str = "console"
    reports_to: ReportsTo | None = None


def run(
    spark: SparkSession,
    url: str,
    target: str,
    *,
    workers: int,
    fleet: str | None = None,
    names: Sequence[str] = (),
    concurrency: int | None = None,
    ship: Path | None = None,
    metrics: tuple[str, int] | None = None,
    log_format: str = "console",
) -> None:
    """Run workers on the executors until the fleet is drained (`drain`). Blocks.

    Args:
        spark: A session with a driver of its own (not Spark Connect), and at least `workers` cores.
        url: URL of the database for the executors.
        target: `MODULE:APP`, which the executors import.
        workers: Number of workers.
        fleet: Name of the fleet; None: a new name.
        names: Job types to run; none: all of the application.
        concurrency: Largest number of async handlers at once in one worker; None: the setting of the application.
        ship: Folder whose modules are sent to the executors; None: the executors have the modules.
        metrics: Host and port at which this process serves the metrics of all workers; None: they measure nothing.
        log_format: "console" or "json", for the logs of the workers.

    Raises:
        Conflict: A fleet of that name runs.
        InvalidInput: The address for metrics cannot be used.
    """
    context = spark.sparkContext
    name = fleet or f"fleet-{secrets.token_hex(4)}"
    member = Member(name, url, target, tuple(names), concurrency, log_format)
    if ship is not None:
        with tempfile.TemporaryDirectory() as folder:
            context.addPyFile(shutil.make_archive(f"{folder}/{name}", "zip", ship))
            _run(spark, member, workers, metrics)
    else:
        _run(spark, member, workers, metrics)


def drain(url: str, fleet: str) -> None:
    """Tell the workers of a fleet to shut down. Raises `NotFound`."""
    with Blocking(url) as database:
        database.run(fleets.drain(database.database, fleet))


def _run(spark: SparkSession, member: Member, workers: int, metrics: tuple[str, int] | None) -> None:
    context = spark.sparkContext
    with ExitStack() as stack:
        database = stack.enter_context(Blocking(member.url))
        database.run(fleets.start(database.database, member.fleet, member.target, workers))
        log.info("fleet_started", fleet=member.fleet, workers=workers)
        try:
            if metrics is not None:
                host = context.getConf().get("spark.driver.host") or "127.0.0.1"
                bind = context.getConf().get("spark.driver.bindAddress")
                collecting = fleet_metrics.collecting(metrics, member.url, Settings(), workers, host, bind)
                member = replace(member, reports_to=stack.enter_context(collecting))
            # One task for each worker; a task that Spark starts again is a new worker.
            context.setJobGroup(member.fleet, f"penstock workers for {member.target}", interruptOnCancel=True)
            context.parallelize(range(workers), workers).mapPartitions(lambda part: serve(member, part)).count()
        finally:
            with suppress(DatabaseUnavailable):
                database.run(fleets.end(database.database, member.fleet))


def serve(member: Member, part: Iterable[int]) -> Iterator[str]:
    """Run one worker in a Python process of an executor. Yields its last id when it was drained."""
    for _ in part:
        os.environ["PENSTOCK_DATABASE_URL"] = member.url
        yield asyncio.run(_serve(member))


async def _serve(member: Member) -> str:
    app = load(member.target)
    logs.configure(member.log_format)
    changes: dict[str, object] = {"database_url": Settings(database_url=member.url).database_url}
    if member.concurrency is not None:
        changes["concurrency"] = member.concurrency
    app.context.settings = app.settings.model_copy(update=changes)
    worker: Worker | None = None
    async with AsyncExitStack() as stack:
        if member.reports_to is not None:
            try:
                meter = stack.enter_context(measured())
                stack.enter_context(fleet_metrics.reporting(member.reports_to, meter, lambda: [worker] if worker else []))
            except ModuleNotFoundError as error:
                # Spark would start a worker that fails for this again and again.
                log.error("fleet_worker_not_measured", error=MissingExtra("--metrics", "metrics", error.name or ""))
        await app.open(timeout=app.settings.start_timeout)
        await stack.enter_async_context(app)
        worker = await app.worker(*member.names)
        looking = asyncio.create_task(_look(worker, member, await app.database()), name="penstock-fleet")
        try:
            await worker.run()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        return worker.id


async def _look(worker: Worker, member: Member, database: Database) -> None:
    """Record which worker serves the fleet, and stop it when the fleet is drained."""
    await worker.started()
    while True:
        try:
            if await fleets.look(database, member.fleet, worker.id, socket.gethostname(), sys.version.split()[0]):
                worker.stop()
                return
        except PenstockError as error:
            log.warning("fleet_look_failed", error=error)
        await asyncio.sleep(_LOOK_EVERY_S)
