"""Sessions of customers from their clicks: keyed state with transformWithState, from a stream to a stream.

A click of a customer belongs to the open session unless the last one was more than half an hour before. A session ends with a
later click, or, when none comes, by a timer in event time. Run it with

    python -m examples.spark.sessions postgresql://... /var/lib/sessions
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

GAP = timedelta(minutes=30)
_GAP_MS = GAP // timedelta(milliseconds=1)
CLICKS = "key string, at timestamp, page string"
SESSIONS = "key string, started_ms long, ended_ms long, clicks long"
STATE_STORE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    )
}  # fmt: skip


class Sessions(StatefulProcessor):
    """The open session of each customer."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Where the session is kept."""
        self._handle = handle
        self._open = handle.getValueState("open", "started_ms long, ended_ms long, clicks long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """The clicks of a customer in a micro-batch. Yields the sessions that they end."""
        session: tuple[int, int, int] | None = None
        if self._open.exists() and (kept := self._open.get()) is not None:
            session = (kept[0], kept[1], kept[2])
        for row in sorted(rows, key=lambda row: row["at_ms"]):
            at = row["at_ms"]
            if session is not None and at - session[1] > _GAP_MS:
                yield _over(key[0], *session)
                session = None
            session = (at, at, 1) if session is None else (min(session[0], at), max(session[1], at), session[2] + 1)
        if session is not None:
            self._open.update(session)
            for timer in list(self._handle.listTimers()):
                self._handle.deleteTimer(timer)
            self._handle.registerTimer(session[1] + _GAP_MS)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        """No click came for half an hour: the session is over."""
        if self._open.exists() and (kept := self._open.get()) is not None:
            yield _over(key[0], kept[0], kept[1], kept[2])
            self._open.clear()

    def close(self) -> None:
        """Nothing is held."""


def _over(key: str, started_ms: int, ended_ms: int, clicks: int) -> Row:
    return Row(key=key, started_ms=started_ms, ended_ms=ended_ms, clicks=clicks)


def sessions(clicks: DataFrame) -> DataFrame:
    """The sessions of a stream of clicks (`CLICKS`), each when it is over (`SESSIONS`)."""
    return (
        clicks.withWatermark("at", "1 minute")
        .withColumn("at_ms", F.unix_millis("at"))
        .groupBy("key")
        .transformWithState(Sessions(), SESSIONS, "append", "EventTime")
    )


def start(spark: SparkSession, url: str, checkpoint: str, **trigger: Any) -> StreamingQuery:
    """From the stream `clicks` to the stream `sessions`, each session once."""
    source = spark.readStream.format("penstock").options(url=url, subscribe="clicks", startingOffsets="earliest")
    found = sessions(source.schema(CLICKS).load())
    events = found.select("key", F.struct("started_ms", "ended_ms", "clicks").alias("value"))
    sink = events.writeStream.format("penstock").options(url=url, stream="sessions", checkpointLocation=checkpoint)
    return sink.outputMode("append").trigger(**(trigger or {"processingTime": "5 seconds"})).start()


if __name__ == "__main__":
    from penstock.spark import session

    start(session(app_name="sessions", config=STATE_STORE), sys.argv[1], sys.argv[2]).awaitTermination()
