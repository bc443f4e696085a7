"""Import order lines as the children of a job group, and report when the last of them has ended.

    python -m examples.imports [LINES [NAME]]      100,000 lines and a new name without arguments

Some lines cannot be imported; the others go on (`on_failure="continue"`), and the report says how many, and why. An import that
was interrupted is started again with its name: each line has the id that it had, so none is imported twice.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from typing import NamedTuple
from uuid import NAMESPACE_URL, UUID, uuid5

from penstock import Fail, Job, NewJob, Penstock

app = Penstock()
BATCH = 10_000
CREATE = (
    "create table if not exists imported_lines"
    " (import text, line bigint, article text not null, cents bigint not null, primary key (import, line))",
    "create table if not exists import_reports"
    " (import text primary key, imported bigint not null, refused bigint not null, cents bigint not null)",
)


class Line(NamedTuple):
    """A line as the source has it."""

    source: str
    number: int
    article: str
    amount: str


@app.job("import-line", max_batch_size=500, linger=timedelta(milliseconds=20))
async def import_line(jobs: list[Job[Line]]) -> list[Fail | None]:
    """Import lines, many in one statement. A line whose amount is no number fails for good."""
    outcomes: list[Fail | None] = []
    good: list[tuple[Line, int]] = []
    for job in jobs:
        try:
            good.append((job.data, round(float(job.data.amount) * 100)))
            outcomes.append(None)
        except ValueError:
            outcomes.append(Fail(f"line {job.data.number} has the amount {job.data.amount!r}"))
    await (await app.database()).fetch(
        "insert into imported_lines select * from unnest($1::text[], $2::bigint[], $3::text[], $4::bigint[])"
        " on conflict do nothing",
        [line.source for line, _ in good],
        [line.number for line, _ in good],
        [line.article for line, _ in good],
        [cents for _, cents in good],
    )
    return outcomes


@app.job("import-report")
async def report(job: Job[str]) -> None:
    """Write the report of an import, when each line has been imported or refused. Harmless when it is repeated after a crash."""
    group = await app.find_group(job.data)
    await (await app.database()).fetch(
        "insert into import_reports select $1, count(*), $2, coalesce(sum(cents), 0) from imported_lines where import = $1"
        " on conflict do nothing",
        job.data,
        group.failed,
    )


def lines(source: str, count: int) -> Iterator[Line]:
    """The lines of a source: one in a thousand cannot be imported."""
    for number in range(count):
        yield Line(source, number, f"article {number % 50}", "much" if number % 1_000 == 999 else f"{number % 100}.50")


def id_of(line: Line) -> UUID:
    """The id of the job of a line: the same in each run of the import."""
    return uuid5(NAMESPACE_URL, f"import:{line.source}:{line.number}")


async def import_lines(source: str, count: int) -> None:
    """Enqueue the lines as children of one group, in batches. The first of them are imported while the last ones are read."""
    found = lines(source, count)
    async with app.job_group(source, then=report, then_data=source, on_failure="continue") as group:
        while batch := list(islice(found, BATCH)):
            await import_line.enqueue_many([NewJob(line, id=id_of(line), group=group) for line in batch])


async def main(count: int, source: str | None = None) -> None:
    """Run an import with a worker in this process; usually that is `penstock worker` with this app, many times."""
    async with app:
        database = await app.database()
        for statement in CREATE:
            await database.fetch(statement)
        source = source or f"orders-{time.time_ns()}"
        worker = await app.worker()
        working = asyncio.create_task(worker.run())
        await worker.started()
        started = time.perf_counter()
        try:
            await import_lines(source, count)
            group = await app.find_group(source)
            assert group.then_job is not None
            await app.wait(group.then_job, timeout=timedelta(minutes=10))
        finally:
            worker.stop()
            await working
        seconds = time.perf_counter() - started
        (row,) = await database.fetch("select imported, refused, cents from import_reports where import = $1", source)
        amount, refused = f"{row['cents'] / 100:,.2f}", f"{row['refused']:,}"
        print(f"{source}: {row['imported']:,} lines imported ({amount}), {refused} refused, in {seconds:.1f} s")
        for job in await app.find_many(workflow=group.id, status="failed", limit=3):
            print("  for example", job.errors[-1]["message"])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, *sys.argv[2:3]))
