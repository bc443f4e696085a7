"""Commands about history: run, schedule, report, failures, status, compact; versions and vacuum of Delta tables."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.app import Penstock
from penstock.cli.backend import database_app, with_database
from penstock.cli.output import AsJson, holding, out, print_json, print_table, say
from penstock.cli.times import span
from penstock.history import lake_queries as lakes
from penstock.history.delta import DeltaLog
from penstock.history.lake import Lake, known_lake

app = typer.Typer(help="History: bring finished jobs into a lake of Parquet, and report on them.", no_args_is_help=True)
Place = Annotated[
    str | None, typer.Option("--lake", envvar="PENSTOCK_LAKE", help="Folder or URI; default: lake in the data folder.")
]
Name = Annotated[str, typer.Option("--name", help="Name of the lake.")]
Master = Annotated[str | None, typer.Option("--master", help="Where Spark runs; default: local[*].")]
Last = Annotated[str, typer.Option("--last", help="The period up to now: 2h, 7d.")]


@app.command()
def run(
    place: Place = None,
    name: Name = "main",
    continuous: Annotated[bool, typer.Option("--continuous", help="Go on until stopped.")] = False,
    interval: Annotated[str, typer.Option(help="Time between batches, with --continuous.")] = "10s",
    max_rows: Annotated[int, typer.Option(min=1, help="Most jobs of a batch.")] = 200_000,
    delta: Annotated[bool, typer.Option("--delta", help="Keep Delta tables over the same files, from now on.")] = False,
    master: Master = None,
    nice: Annotated[
        int, typer.Option(min=0, max=19, help="How far a Spark on this machine steps back behind its other processes.")
    ] = 19,
    throttle_timeout: Annotated[
        str, typer.Option(help="How long a batch waits while others keep this machine more than half busy, with --continuous.")
    ] = "1m",
    as_json: AsJson = False,
) -> None:
    """Bring what has finished into the lake, once or continuously. From then on prune drops only what the lake has."""
    from penstock.spark import session
    from penstock.spark.history import Pipeline

    penstock = database_app()
    # The server is started, and held, for as long as Spark needs it.
    url, lake = with_database(lambda opened: _prepared(opened, name, place), penstock)
    here = master is None or master.startswith("local")
    wait = span(throttle_timeout) if continuous and here else timedelta(0)
    if sys.platform != "win32" and here:
        # Not before: an embedded server that is started here serves the workers.
        os.nice(nice)
    with holding(penstock):
        spark = session(master=master, app_name=f"penstock history {name}")
        ran = Pipeline(spark, url, lake, max_rows=max_rows, delta=delta, throttle_timeout=wait).run(
            continuous=continuous, interval=f"{span(interval).total_seconds():.3f} seconds"
        )
    say(ran, f"{ran.jobs:,} jobs in {ran.batches} batches to {lake.uri}", as_json)


@app.command()
def schedule(
    expression: Annotated[str, typer.Argument(help='When: a cron expression, such as "*/5 * * * *".')],
    place: Place = None,
    name: Name = "main",
    tz: Annotated[str, typer.Option(help="Time zone of the expression.")] = "UTC",
    max_rows: Annotated[int, typer.Option(min=1, help="Most jobs of a batch.")] = 200_000,
    delta: Annotated[bool, typer.Option("--delta", help="Keep Delta tables over the same files, from now on.")] = False,
    master: Master = None,
) -> None:
    """Bring what has finished into the lake at these times, until stopped. Each run is a job, of the type history-NAME."""
    from penstock.spark.history import ScheduledRun, run_scheduled

    penstock = database_app()
    _, lake = with_database(lambda opened: _prepared(opened, name, place), penstock)
    run_lake = penstock.spark_job(f"history-{name}", master=master, keep_result=True)(run_scheduled)

    @penstock.cron(expression, tz=tz, name=f"history-{name}-times")
    async def enqueue() -> None:
        # A run that waits brings in what finished meanwhile, too.
        await run_lake.options(unique=lake.uri[-255:]).enqueue(ScheduledRun(lake.name, lake.uri, max_rows, delta))

    with holding(penstock):
        penstock.run_worker_sync()


@app.command()
def report(
    name: Name = "main",
    last: Last = "1d",
    plots: Annotated[Path | None, typer.Option(help="Draw into this folder: HTML, and PNG where there is a Chromium.")] = None,
    as_json: AsJson = False,
) -> None:
    """What finished in a period: counts, waiting and run times, failures by cause, busy keys, workers."""
    from penstock.spark import report as reports

    until = datetime.now(UTC) + timedelta(minutes=1)
    since = until - span(last)

    async def gather(opened: Penstock) -> Any:
        return await reports.report(await opened.database(), name, since, until)

    found = with_database(gather)
    if as_json:
        print_json({"types": found.types, "failures": found.failures, "keys": found.keys, "workers": found.workers})
    else:
        reports.print_report(out, found)
    if plots is not None and found.types:
        from penstock.spark import session

        for path in reports.plot(session(app_name="penstock report"), found, plots):
            out.print(f"wrote {path}", highlight=False)


@app.command()
def failures(name: Name = "main", days: Annotated[int, typer.Option(min=1)] = 7, as_json: AsJson = False) -> None:
    """Failed attempts of some days by cause, beside as many days before."""

    async def gather(opened: Penstock) -> Any:
        database = await opened.database()
        await known_lake(database, name)
        return await lakes.failures(database, name, datetime.now(UTC).date(), days)

    found = with_database(gather)
    if as_json:
        print_json(found)
        return
    print_table(
        ["signature", "type", "error", "message", "failures", "before", "new", "last", "for example"],
        [
            (f.signature, f.name, f.kind, f.message[:80], f.failures, f.failures_before, f.new, f.last_at, f.sample_id)
            for f in found
        ],
        empty="no failures in the lake",
    )


@app.command()
def runs(
    workflow: Annotated[str | None, typer.Argument(help="Name of the workflow; default: all.")] = None,
    name: Name = "main",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1_000, help="How many at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Runs of workflows that have ended, latest first, also those that were pruned, as far back as keep_history."""

    async def gather(opened: Penstock) -> Any:
        database = await opened.database()
        await known_lake(database, name)
        return await lakes.runs(database, name, workflow, limit)

    found = with_database(gather)
    if as_json:
        print_json(found)
        return
    print_table(
        ["run", "workflow", "status", "started", "ended", "seconds", "steps", "failed", "retry of"],
        [
            (r.name, r.workflow, r.status, r.started_at, r.finished_at, r.duration_s, r.steps, r.failed + r.expired, r.retry_of)
            for r in found
        ],
        empty="no runs in the lake",
    )


@app.command()
def status(as_json: AsJson = False) -> None:
    """The lakes, and how far each is."""

    async def gather(opened: Penstock) -> Any:
        return await lakes.lakes(await opened.database())

    found = with_database(gather)
    if as_json:
        print_json(found)
        return
    print_table(
        ["lake", "uri", "batches", "jobs", "guards", "last batch"],
        [(lake.name, lake.uri, lake.batch + 1, lake.jobs, lake.guards, lake.updated_at) for lake in found],
        empty="no lakes yet: penstock history run",
    )


@app.command("compact")
def compact_lake(place: Place = None, name: Name = "main") -> None:
    """Make one file of the many small ones of each day and type."""
    from penstock.spark.history import compact

    penstock = database_app()
    url, lake = with_database(lambda opened: _existing(opened, name, place), penstock)
    with holding(penstock):
        replaced = compact(url, lake)
    out.print(f"{replaced} files replaced", highlight=False)


@app.command()
def versions(
    place: Place = None,
    name: Name = "main",
    kind: Annotated[str, typer.Option(help="jobs, attempts, rollups or runs.")] = "jobs",
    as_json: AsJson = False,
) -> None:
    """The states of a lake with Delta tables, to which a reader can go back."""
    _, lake = with_database(lambda opened: _existing(opened, name, place))
    found = DeltaLog(lake).versions(kind)
    if as_json:
        print_json(found)
        return
    print_table(
        ["version", "batch", "at", "files"], [(one.version, one.batch, one.at, one.files) for one in found], empty="no versions"
    )


@app.command()
def vacuum(
    place: Place = None,
    name: Name = "main",
    keep: Annotated[str, typer.Option(help="How far back a reader can still go.")] = "7d",
) -> None:
    """Delete the files of a lake with Delta tables that compaction has replaced, and that no state since then has."""
    _, lake = with_database(lambda opened: _existing(opened, name, place))
    out.print(f"{DeltaLog(lake).vacuum(span(keep))} files deleted", highlight=False)


async def _prepared(opened: Penstock, name: str, place: str | None) -> tuple[str, Lake]:
    """The URL of the database, and the lake: where it is known to be, unless a place is given."""
    known = {record.name: record.uri for record in await lakes.lakes(await opened.database())}
    default = known.get(name) or os.fspath(opened.settings.data_dir / "lake")
    return await opened.start_server(), Lake(name, place or default)


async def _existing(opened: Penstock, name: str, place: str | None) -> tuple[str, Lake]:
    """As `_prepared`, of a lake that exists. Raises `NotFound`."""
    await known_lake(await opened.database(), name)
    return await _prepared(opened, name, place)
