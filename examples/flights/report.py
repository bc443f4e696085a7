"""What was learned, how fast, and what failed."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock import Penstock, Status
from penstock.postgres.database import Database


async def print_report(
    console: Console, app: Penstock, database: Database, count: int, enqueued_s: float, worked_s: float
) -> None:
    """Print the tables of `queries.sql`, the throughput and the failures."""
    text = Path(__file__).with_name("queries.sql").read_text("utf-8")
    for title, query in re.findall(r"^-- (Worst .*)\n((?:.+\n)+)", text, re.MULTILINE):
        rows = await database.fetch(query.rstrip().rstrip(";"))
        table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
        for column in rows[0].keys() if rows else ():
            table.add_column(str(column), justify="right" if rows and not isinstance(rows[0][column], str) else "left")
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        console.print(table)
        console.print()

    counts = {c.name: c for c in await app.counts()}
    console.print(
        f"[bold]{count:,}[/bold] departures enqueued in {enqueued_s:.1f} s ({count / enqueued_s:,.0f}/s, file included)"
    )
    console.print(f"worked in {worked_s:.1f} s ({count / worked_s:,.0f}/s, with their facts and retries)")
    summaries = counts["carrier-day"].succeeded_last_hour
    console.print(f"coalesced into {summaries:,} runs of the summary job of a carrier's day (last hour)")
    failed = counts["departure"].failed_last_hour
    console.print(f"[bold]{failed:,}[/bold] departures failed for good (last hour): cancelled or diverted. One of them:")
    for record in await app.find_many(name="departure", status=Status.FAILED, limit=1):
        console.print(f"  {record.id}  {record.errors[-1]['message']}", highlight=False)
        console.print("Look at it, or at any other:")
        console.print(f"  .venv/bin/penstock jobs show {record.id}", highlight=False)
        console.print("  .venv/bin/penstock jobs list --type departure --status failed", highlight=False)
        console.print("  .venv/bin/penstock stats", highlight=False)
