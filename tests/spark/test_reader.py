"""The streaming reader as Spark's process calls it, without a JVM."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from penstock import Penstock
from penstock.errors import InvalidInput
from penstock.spark.jobs.options import JobReadOptions
from penstock.spark.jobs.source import ArchiveStreamReader, JobReader, scan_of
from penstock.spark.source import PenstockSource

pytestmark = pytest.mark.no_jvm


def reader(url: str, **options: str) -> ArchiveStreamReader:
    return ArchiveStreamReader(JobReadOptions.parse({"url": url, "waitS": "0", **options}), ["id", "status"])


def rows(reader: ArchiveStreamReader, start: dict[str, Any], end: dict[str, Any]) -> int:
    # As in a task: another process has a copy.
    copy = pickle.loads(pickle.dumps(reader))
    return sum(batch.num_rows for part in reader.partitions(start, end) for batch in copy.read(part))


def test_a_query_that_begins_now_reads_what_comes(url: str, archive: Any) -> None:
    archive(3)
    here = reader(url)
    start = here.initialOffset()
    assert here.latestOffset(start, ReadAllAvailable()) == start
    archive(4)
    end = here.latestOffset(start, ReadAllAvailable())
    assert here.initialOffset() == start
    assert rows(here, start, end) == 4
    assert here.latestOffset(end, ReadAllAvailable()) == end
    here.stop()


def test_the_first_batch_is_the_same_after_a_restart(url: str, archive: Any) -> None:
    here = reader(url)
    start = here.initialOffset()
    archive(4)
    end = here.latestOffset(start, ReadAllAvailable())
    here.stop()
    archive(2)
    # Spark has noted the end of the batch and not its beginning, and "now" is later than both.
    again = reader(url)
    assert again.initialOffset() != start
    assert rows(again, again.initialOffset(), end) == 4
    assert rows(again, end, again.latestOffset(end, ReadAllAvailable())) == 2
    again.stop()


def test_available_now_stops_where_it_began(url: str, archive: Any) -> None:
    archive(5)
    here = reader(url, startingOffsets="earliest", maxRowsPerTrigger="3")
    here.prepareForTriggerAvailableNow()
    archive(5)
    limit = here.getDefaultReadLimit()
    assert isinstance(limit, ReadMaxRows) and limit.max_rows == 3
    position, sizes = here.initialOffset(), []
    while (end := here.latestOffset(position, limit)) != position:
        sizes.append(rows(here, position, end))
        position = end
    assert sizes == [3, 2]
    here.stop()


def test_a_time_to_start_from_leaves_out_what_was_before(url: str, archive: Any, ask: Any) -> None:
    archive(2)
    (now,) = ask("select clock_timestamp() as at")
    archive(3)
    here = reader(url, startingTimestamp=now["at"].isoformat())
    start = here.initialOffset()
    assert rows(here, start, here.latestOffset(start, ReadAllAvailable())) == 3
    here.stop()


def test_days_that_are_pruned_under_a_query_that_fell_behind_fail_it(url: str, archive: Any, ask: Any) -> None:
    here = reader(url, startingOffsets="latest")
    lenient = reader(url, failOnDataLoss="false")
    start = here.initialOffset()

    def archive_old(day: str) -> None:
        ask("select penstock.ensure_archive($1::text::timestamptz)", day)
        ask(
            "insert into penstock.archived_jobs (id, finished_at, created_at, run_after, status, attempt, max_attempts,"
            " priority, name, data)"
            " values (gen_random_uuid(), $1::text::timestamptz, now(), now(), 'failed', 1, 1, 0, 't', '1')",
            day,
        )

    archive_old("2024-05-05T12:00:00Z")
    end = here.latestOffset(start, ReadAllAvailable())
    assert rows(here, start, end) == 1
    ask("select * from penstock.prune('30 days')")
    # That one was read.
    archive(1)
    end = here.latestOffset(end, ReadAllAvailable())
    archive_old("2024-06-06T12:00:00Z")
    ask("select * from penstock.prune('30 days')")
    archive(1)
    with pytest.raises(InvalidInput, match="lost days before they were read: 2024-06-06"):
        here.latestOffset(end, ReadAllAvailable())
    assert rows(lenient, end, lenient.latestOffset(end, ReadAllAvailable())) == 1
    for one in (here, lenient):
        one.stop()


def test_a_job_of_a_topic_has_the_payload_of_its_message(url: str, ask: Any) -> None:
    ask("select penstock.declare_topic('memos')")
    ask("select penstock.subscribe('memos', 'bob')")
    ask("select penstock.publish('memos', '{\"text\": \"go home\"}')")
    queued = JobReader(JobReadOptions.parse({"url": url, "table": "queued_jobs"}), ["data"])
    assert [text for part in queued.partitions() for batch in queued.read(part) for text in batch["data"].to_pylist()] == [
        '{"text": "go home"}'
    ]
    (job,) = ask("select id, attempt, lease from penstock.claim('w', '{memos_bob}', 10)")
    ask("select * from penstock.settle($1, $2, $3, '{succeeded}')", [job["id"]], [job["attempt"]], [job["lease"]])
    done = JobReader(JobReadOptions.parse({"url": url}), ["data", "name"])
    found = [row for part in done.partitions() for batch in done.read(part) for row in batch.to_pylist()]
    assert found == [{"data": '{"text": "go home"}', "name": "memos_bob"}]


def test_columns_that_few_jobs_have_come_as_they_are(url: str, archive: Any, ask: Any) -> None:
    archive(2)
    archive(1, "u", "failed")
    ask("update penstock.archived_jobs set result = '{\"a\": [1, null]}', replay_of = id where name = 'u'")
    ask("update penstock.archived_jobs set unique_key = 'only' where id = (select id from penstock.archived_jobs limit 1)")
    seldom = ["errors", "unique_key", "replay_of", "result"]
    for count in range(1, 5):
        columns = ["id", *seldom[:count], "status"]
        here = JobReader(JobReadOptions.parse({"url": url}), columns)
        batches = [batch for part in here.partitions() for batch in here.read(part)]
        assert {tuple(batch.schema.names) for batch in batches} == {tuple(columns)}
        query = f"select {', '.join(f'{name}::text' for name in columns)} from penstock.archived_jobs"
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert sorted(tuple(row.values()) for row in rows) == sorted(tuple(row) for row in ask(query))
    # A batch without any.
    ask("delete from penstock.archived_jobs where unique_key is not null or errors is not null")
    here = JobReader(JobReadOptions.parse({"url": url}), ["id", *seldom])
    (found,) = [row for part in here.partitions() for batch in here.read(part) for row in batch.to_pylist()]
    assert [found[name] for name in seldom] == [None] * 4


async def test_a_day_that_is_pruned_while_a_read_is_planned_is_an_error(app: Penstock) -> None:
    with pytest.raises(InvalidInput, match="archived_jobs_p20240505 is gone") as refused:
        await scan_of(await app.database(), "archived_jobs_p20240505", {"id": "string"}, {})
    assert "read again" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"table": "workers"}, "no table workers", "archived_jobs"),
        ({"columns": "id,nope"}, "no column nope", "finished_at"),
        ({"startingOffsets": "somewhere"}, "not a position", ""),
        ({"maxRowsPerTrigger": "many"}, "'many'", "is a number"),
        ({"failOnDataLoss": "perhaps"}, "'perhaps'", "true or false"),
        ({"startingTimestamp": "yesterday"}, "'yesterday'", "milliseconds"),
        ({"startingTimestamp": "1", "startingOffsets": "latest"}, "exclude each other", "one of them"),
        ({"startingOffsetsByTimestamp": "{}"}, "startingOffsetsByTimestamp is for streams", "docs/spark.md"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_do(options: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        PenstockSource({"url": "postgresql://x", **options}).schema()
    assert hint in str(refused.value.hint)


def test_a_position_of_another_database_is_refused(url: str) -> None:
    here = reader(url)
    with pytest.raises(Exception, match="restored or replaced"):
        here.latestOffset({"seen": "99999999:99999999:"}, ReadAllAvailable())
    here.stop()
