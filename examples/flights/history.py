"""The last part of the main job: history into the lake, and what it says, with local Spark."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

from penstock import Settings
from penstock.history.lake import Lake
from penstock.postgres.database import Database
from penstock.spark import session
from penstock.spark.history import Pipeline, read_lake
from penstock.spark.report import Report, plot, print_report, report, span

_PERIOD = timedelta(hours=1)


def show_history(console: Console, url: str, data_dir: Path) -> None:
    """Run the pipeline over what just ran, and print and draw its report of the last hour."""
    console.print()
    with console.status("starting Spark"):
        spark = session(app_name="flights")
    lake = Lake("main", str(data_dir / "lake"))
    started = time.perf_counter()
    with console.status("bringing history into the lake"):
        ran = Pipeline(spark, url, lake).run()
    took = time.perf_counter() - started
    console.print(
        f"[bold]{ran.jobs:,}[/bold] finished jobs into the lake in {took:.1f} s ({ran.jobs / took:,.0f}/s): {lake.uri}",
        highlight=False,
        soft_wrap=True,
    )
    until = datetime.now(UTC) + timedelta(minutes=1)
    found = asyncio.run(_report(url, until))
    print_report(console, found)

    jobs = read_lake(spark, url, types=["departure"]).where(F.col("finished_at") >= F.lit(until - _PERIOD))
    carriers = (
        jobs.groupBy(F.get_json_object("data", "$.carrier").alias("carrier"))
        .agg(
            F.count("*").alias("jobs"),
            F.count_if(F.col("status") == "failed").alias("failed"),
            *(F.percentile_approx(name, rank, 1000) for name in ("delay_s", "run_s") for rank in (0.5, 0.99)),
        )
        .orderBy(F.desc("jobs"))
        .collect()
    )
    table = Table(title="Carriers", title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in ("carrier", "jobs", "failed", "wait p50", "p99", "run p50", "p99"):
        table.add_column(column, justify="left" if column == "carrier" else "right")
    for row in carriers:
        table.add_row(row.carrier, f"{row.jobs:,}", f"{row.failed:,}", *(span(value) for value in row[3:]))
    console.print()
    console.print(table)
    if found.types:
        written = plot(spark, found, data_dir / "report")
        console.print(f"drawn: {', '.join(str(path) for path in written)}", highlight=False, soft_wrap=True)
    console.print("Look again, at any time:\n  .venv/bin/penstock history report --last 1h", highlight=False)
    spark.stop()


async def _report(url: str, until: datetime) -> Report:
    database = Database(url, Settings())
    await database.open()
    try:
        return await report(database, "main", until - _PERIOD, until)
    finally:
        await database.close()
