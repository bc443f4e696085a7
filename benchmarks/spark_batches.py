"""What a micro-batch of Spark costs: by the number of partitions, in connections, and when nothing comes."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS = 2_000
BATCHES = 8
RATIO, IDLE_PER_S = 2.0, 5.0  # the budgets


def missed(by_width: Mapping[int, tuple[float, int]], idle: float) -> list[str]:
    """The budgets of micro-batches that are not met, in words.

    Args:
        by_width: Seconds of a batch, and connections opened after the first ones, by the number of partitions (1 is among them).
        idle: Transactions a second of an idle query.
    """
    one = by_width[1][0]
    over = [
        f"a batch over {width} partitions takes {seconds / one:.2f} of one over one partition, more than {RATIO:.1f}"
        for width, (seconds, _) in by_width.items()
        if seconds > RATIO * one
    ]
    over += [f"batches over {width} partitions open {opened} connections" for width, (_, opened) in by_width.items() if opened]
    if idle > IDLE_PER_S:
        over.append(f"an idle query takes {idle:.1f} transactions a second, more than {IDLE_PER_S:.0f}")
    return over


def ask(url: str, query: str, *args: Any) -> list[Any]:
    """Run one statement, outside Spark."""

    async def run() -> list[Any]:
        connection = await asyncpg.connect(url)
        try:
            return list(await connection.fetch(query, *args, timeout=600))
        finally:
            await connection.close()

    return asyncio.run(run())


class MicroBatches:
    """Queries from stream to stream, each over a stream with another number of partitions.

    Args:
        spark: A session.
        url: The database.
    """

    def __init__(self, spark: SparkSession, url: str) -> None:
        self._spark = spark
        self._url = url

    def by_partitions(self, widths: tuple[int, ...] = (1, 16, 128), runs: int = 3) -> dict[int, tuple[float, int]]:
        """By partitions: the median of the runs' median seconds of a batch, and the connections of all batches but the first."""
        found: dict[int, list[tuple[float, int]]] = {width: [] for width in widths}
        for _ in range(runs):
            # In turn, so that what else the machine does meets all of them.
            for width in widths:
                found[width].append(self._one(width))
        return {
            width: (statistics.median(seconds for seconds, _ in taken), max(opened for _, opened in taken))
            for width, taken in found.items()
        }

    def idle(self, streams: int = 200, seconds: float = 20.0) -> float:
        """Transactions a second of a query that follows so many streams in which nothing happens."""
        ask(self._url, "select penstock.create_stream('idle' || n, 1) from generate_series(1, $1::integer) n", streams)
        names = ",".join(f"idle{n}" for n in range(1, streams + 1))
        with self._query(names, "noop", {}):
            time.sleep(5)
            before, begun = self._counted("xact_commit + xact_rollback"), time.monotonic()
            time.sleep(seconds)
            # Those of this measurement: each look is one.
            return (self._counted("xact_commit + xact_rollback") - before - 1) / (time.monotonic() - begun)

    def _one(self, width: int) -> tuple[float, int]:
        ask(self._url, "select penstock.drop_stream(name, true) from penstock.streams where name in ('in', 'out')")
        ask(self._url, "select penstock.create_stream(name, $1::integer) from unnest('{in,out}'::text[]) as name", width)
        times: list[float] = []
        opened = 0
        # Asked again soon, since what is waited for here is that nothing is left.
        with self._query("in", "penstock", {"url": self._url, "stream": "out"}, waitS="0.1") as query:
            for batch in range(BATCHES):
                before = self._backends()
                ask(
                    self._url,
                    "select count(*) from penstock.append_many('in', array_fill('{\"n\": 1}'::json, array[$1::integer]),"
                    " array(select n::text from generate_series(1, $1) n))",
                    EVENTS,
                )
                query.processAllAvailable()
                done = next(one for one in reversed(query.recentProgress) if one.numInputRows)
                # The first two open what the others keep, and warm Spark up.
                if batch > 1:
                    times.append(done.durationMs["triggerExecution"] / 1000)
                    opened += len(self._backends() - before)
        return statistics.median(times), opened

    @contextmanager
    def _query(self, names: str, format: str, options: dict[str, str], **read: str) -> Iterator[Any]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            query = (
                self._spark.readStream.format("penstock").options(url=self._url, subscribe=names, **read)
                .option("columns", "key,value").load()
                .writeStream.format(format).options(**options).option("checkpointLocation", folder).start()
            )  # fmt: skip
            try:
                query.processAllAvailable()
                yield query
            finally:
                query.stop()

    def _backends(self) -> set[str]:
        query = "select pid || backend_start::text as one from pg_stat_activity where application_name = 'penstock-spark'"
        return {row["one"] for row in ask(self._url, query)}

    def _counted(self, what: str) -> int:
        # Of this database alone; sessions hand in their counts at most once a second.
        return int(ask(self._url, f"select {what} as n from pg_stat_database where datname = current_database()")[0]["n"])
