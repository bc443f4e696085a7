"""The main job: enqueue the flights, work through them, follow the aircraft on a stream, and show what was learned.

It ends by saying how to open the dashboard, where there is something to see on each page.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.flights import demo, jobs, stream
from examples.flights.data import TOTAL, flights
from examples.flights.history import show_history
from examples.flights.report import print_report

SLICE = 100_000
console = Console()


async def main(count: int) -> None:
    """Run `count` flights as jobs."""
    async with jobs.app as app:
        database = await app.database()
        connection = await database.connect()
        await connection.execute(Path(__file__).with_name("tables.sql").read_text("utf-8"))
        jobs.facts = jobs.Facts(connection)
        columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            enqueued_s = await _enqueue(progress, count)
            worked_s = await _work(progress, count)
        await print_report(console, app, database, count, enqueued_s, worked_s)
        await connection.close()
        console.print("\nThe same departures on a stream, while consumers that follow each aircraft's day join and leave:")
        await stream.main(count)
        # A thread of its own, since Spark blocks; the app stays open, and with it the embedded server.
        await asyncio.to_thread(show_history, console, await app.start_server(), app.settings.data_dir)
        console.print("\nA round of every other kind of work: a pool, a topic, timers, a job group, consumers that fail.")
        await demo.one_round()
    console.print("Look at all of it in a browser, as it is now, or with live work:", highlight=False)
    console.print("  .venv/bin/penstock dashboard\n  make demo", highlight=False)


async def _enqueue(progress: Progress, count: int) -> float:
    # The summary and the topic are declared before any departure can want to use them in its own transaction.
    await jobs.summarise.enqueue_many([])
    await jobs.app.subscribe(*jobs.app.types.values())
    task = progress.add_task("enqueued", total=count)
    started = time.perf_counter()
    source = islice(flights(), count)
    while batch := list(islice(source, 10_000)):
        await jobs.departure.enqueue_many(batch)
        progress.advance(task, len(batch))
    return time.perf_counter() - started


async def _work(progress: Progress, count: int) -> float:
    task = progress.add_task("worked", total=count)
    worker = await jobs.app.worker()
    started = time.perf_counter()
    working = asyncio.create_task(worker.run())
    unfinished = count
    try:
        while unfinished and not working.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(working), 0.3)
            counts = {c.name: c.ready + c.deferred + c.in_progress for c in await jobs.app.counts()}
            unfinished = sum(counts.values())
            progress.update(task, completed=max(0, count - counts["departure"]))
    finally:
        worker.stop()
        await working
    return time.perf_counter() - started


if __name__ == "__main__":
    full = os.environ.get("FULL", "") not in ("", "0")
    uvloop.run(main(TOTAL if full else SLICE))
