"""Commands for millions: bulk enqueue, replay, export. All run on Spark."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.app import Penstock
from penstock.cli.backend import database_app, with_database
from penstock.cli.history import Master
from penstock.cli.output import AsJson, err, holding, out, say
from penstock.errors import InvalidInput
from penstock.history.lake import known_lake

app = typer.Typer(help="Bulk work on Spark: enqueue, replay, export.", no_args_is_help=True)
Format = Annotated[str, typer.Option("--from", help="What Spark reads: parquet, csv, json, orc, text, jdbc, ...")]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help="Of the format; may be repeated.")
]
Column = typer.Option(help="Column with it.")


@app.command()
def enqueue(
    job: Annotated[str, typer.Option("--type", "-t", help="Job type.")],
    paths: Annotated[list[str] | None, typer.Argument(help="Files, folders or URIs.")] = None,
    format: Format = "parquet",
    options: Options = None,
    select: Annotated[str | None, typer.Option(help="SQL over the source, which is the table source.")] = None,
    data: Annotated[str | None, typer.Option(help="Column with the payload; default: all columns.")] = None,
    key: Annotated[str | None, Column] = None,
    id: Annotated[str | None, Column] = None,
    priority: Annotated[str | None, Column] = None,
    run_after: Annotated[str | None, Column] = None,
    expires_at: Annotated[str | None, Column] = None,
    unique: Annotated[str | None, Column] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; the same name goes on where it was interrupted.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.1, max=1e9, help="Most jobs a second.")] = None,
    slice_rows: Annotated[int, typer.Option(min=1, help="Jobs of one transaction, about.")] = 500_000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check, count, and show some.")] = False,
    master: Master = None,
    as_json: AsJson = False,
) -> None:
    """Enqueue every row of a source as a job."""
    from penstock.spark import bulk, session
    from penstock.spark.jobs.options import JobWriteOptions
    from penstock.spark.jobs.sink import check_schema

    penstock, url = _opened()
    columns = bulk.Columns(data, key, id, priority, run_after, expires_at, unique)
    name = run or secrets.token_hex(4)
    with holding(penstock):
        # Before a JVM is started, and of a dry run too: it is there to find what would be refused.
        bulk.check_type(url, job)
        spark = session(master=master, app_name=f"penstock bulk {job}")
        frame = bulk.as_jobs(bulk.source(spark, format, paths or [], _pairs(options), select), columns)
        check_schema(JobWriteOptions(url=url, job=job), frame.schema)
        if dry_run:
            out.print(f"{frame.count():,} jobs of type {job}, such as:", highlight=False)
            for row in frame.limit(3).collect():
                out.print(f"  {row.asDict()}", highlight=False, markup=False)
            return
        if run is None:
            err.print(f"should it be interrupted, add: --run {name}", highlight=False)
        bars = (TextColumn("jobs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*bars, console=err, transient=True) as progress:
            task = progress.add_task("jobs", total=None)
            done = bulk.enqueue(
                frame,
                url,
                job,
                run=name,
                rate=rate,
                slice_rows=slice_rows,
                progress=lambda rows, total: progress.update(task, completed=rows, total=total),
            )
    say(done, f"{done.rows:,} jobs, {done.skipped:,} of them by an earlier try of this run", as_json)


@app.command()
def replay(
    where: Annotated[str, typer.Option(help="SQL over the jobs of the lake, such as: type = 'mail' and status = 'failed'.")],
    lake: Annotated[str, typer.Option(help="Name of the lake.")] = "main",
    run: Annotated[str | None, typer.Option(help="Name of the run; each job is replayed once for each name.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    master: Master = None,
) -> None:
    """Enqueue jobs of the lake again."""
    from penstock.spark import bulk, session
    from penstock.spark.history import read_lake

    penstock, url = _opened(lake)
    name = run or secrets.token_hex(4)
    with holding(penstock):
        found = read_lake(session(master=master, app_name="penstock replay"), url, lake, "jobs").where(where)
        if dry_run:
            out.print(f"{found.count():,} jobs", highlight=False)
            return
        out.print(f"{bulk.replay(found, url, name):,} jobs replayed in run {name}", highlight=False)


@app.command()
def export(
    to: Annotated[str, typer.Argument(help="Folder or URI.")],
    table: Annotated[
        str, typer.Option(help="archived_jobs or queued_jobs; or of the lake: jobs, attempts, rollups, runs.")
    ] = "jobs",
    where: Annotated[str | None, typer.Option(help="SQL over the table.")] = None,
    format: Annotated[str, typer.Option(help="What Spark writes: parquet, csv, json, orc.")] = "parquet",
    lake: Annotated[str, typer.Option(help="Name of the lake.")] = "main",
    options: Options = None,
    master: Master = None,
) -> None:
    """Write jobs to files."""
    from penstock.spark import session
    from penstock.spark.history import SCHEMAS, read_lake

    penstock, url = _opened(lake if table in SCHEMAS else None)
    with holding(penstock):
        spark = session(master=master, app_name="penstock export")
        if table in SCHEMAS:
            frame = read_lake(spark, url, lake, table)
        else:
            frame = spark.read.format("penstock").options(url=url, table=table, pushdown="true").load()
        if where:
            frame = frame.where(where)
        frame.write.format(format).options(**_pairs(options)).mode("errorifexists").save(to)
    out.print(f"written to {to}", highlight=False)


def _opened(lake: str | None = None) -> tuple[Penstock, str]:
    """The application and the URL of its database. Raises `NotFound` for a lake that does not exist."""
    penstock = database_app()

    async def url(opened: Penstock) -> str:
        if lake is not None:
            await known_lake(await opened.database(), lake)
        return await opened.start_server()

    return penstock, with_database(url, penstock)


def _pairs(given: list[str] | None) -> dict[str, Any]:
    pairs = {}
    for pair in given or []:
        name, separator, value = pair.partition("=")
        if not separator:
            raise InvalidInput(f"{pair!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs
