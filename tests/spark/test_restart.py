"""PostgreSQL is killed under a running query, again and again; every event counts once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg

from penstock.postgres.database import Database
from penstock.postgres.embedded import EmbeddedServer
from penstock.postgres.migrate import migrate
from penstock.settings import Settings
from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

EVENTS, BATCH = 160, 20


async def patiently(url: str, query: str, *args: Any) -> list[Any]:
    """Run a statement, again while the server is away."""

    async def once() -> list[Any] | None:
        try:
            connection = await asyncpg.connect(url, timeout=10)
            try:
                return [*(await connection.fetch(query, *args, timeout=20))] or [None]
            finally:
                await connection.close(timeout=5)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return None

    found: list[Any] = await eventually(once, "an answer of the server", timeout=60)
    return found


class Copy:
    """A query from the stream a to the stream b, started again when it failed."""

    def __init__(self, spark: SparkSession, url: str, checkpoint: Path) -> None:
        self._spark, self._url, self._checkpoint = spark, url, checkpoint
        self.starts = 0
        self.query: StreamingQuery | None = None

    async def reaches(self, events: int) -> None:
        """Wait until so many events are in b."""

        async def there() -> bool:
            if self.query is None or not self.query.isActive:
                # A batch whose staged rows were lost with the server fails, and is repeated.
                # In this thread: Spark finds formats only where it knows of a session.
                self.query = self._start()
                self.starts += 1
            ends = "select coalesce(sum(next_offset), 0)::integer as events from penstock.stream_bounds('b')"
            return bool((await patiently(self._url, ends))[0]["events"] >= events)

        await eventually(there, f"{events} events", timeout=120)

    def _start(self) -> StreamingQuery:
        return (
            self._spark.readStream.format("penstock").options(url=self._url, subscribe="a", startingOffsets="earliest", waitS="1")
            .schema("key string, n long").load().selectExpr("key", "named_struct('n', n) as value")
            .writeStream.format("penstock").options(url=self._url, stream="b", checkpointLocation=str(self._checkpoint)).start()
        )  # fmt: skip


async def test_a_query_outlives_a_server_that_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "server") as server:
        database = Database(server.url, Settings())
        await database.open()
        await migrate(database)
        await database.close()
        for name in ("a", "b"):
            await patiently(server.url, "select penstock.create_stream($1, 2)", name)
        copy = Copy(spark, server.url, tmp_path / "checkpoint")
        try:
            for number in range(EVENTS // BATCH):
                # Numbered, so that an append whose answer was lost can be repeated.
                await patiently(
                    server.url,
                    "select * from penstock.append_many('a', array(select json_build_object('n', n)"
                    " from unnest($1::integer[]) n), array(select n::text from unnest($1::integer[]) n),"
                    " p_producer => 'p', p_sequence => $2)",
                    list(range(number * BATCH, number * BATCH + BATCH)), number,
                )  # fmt: skip
                await copy.reaches((number - 1) * BATCH)
                if number % 4 == 2:
                    os.kill(int((tmp_path / "server/postgres/postmaster.pid").read_text().split()[0]), signal.SIGKILL)
            await copy.reaches(EVENTS)
            assert copy.query is not None
            copy.query.processAllAvailable()
        finally:
            if copy.query is not None:
                copy.query.stop()
        rows = await patiently(
            server.url,
            "select (e.data ->> 'n')::integer as n from penstock.stream_bounds('b') b"
            " cross join lateral penstock.read_events('b', b.partition, 0, 1000) e",
        )
        assert sorted(row["n"] for row in rows) == list(range(EVENTS)), f"after {copy.starts} starts"
