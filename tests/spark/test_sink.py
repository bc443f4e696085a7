"""The sink: every row a job, once, whatever fails."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.command_line import penstock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Ask = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def job_type(ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")


def write(frame: DataFrame, url: str, **options: str) -> None:
    frame.write.format("penstock").option("url", url).options(**{"job": "t", **options}).mode("append").save()


def jobs(ask: Ask) -> list[int]:
    return sorted(row["n"] for row in ask("select (data ->> 'n')::integer as n from penstock.queued_jobs"))


def test_rows_become_jobs_with_all_that_a_job_has(spark: SparkSession, url: str, ask: Ask) -> None:
    frame = spark.sql(
        """
        select named_struct('n', 1, 'tags', array('a', 'b')) as data, 'acme' as key, 5 as priority, 'only' as unique_key,
            timestamp'2040-01-01 00:00:00' as run_after, timestamp'2041-01-01 00:00:00' as expires_at,
            '00000000-0000-4000-8000-000000000001' as id
        """
    )
    write(frame, url)
    (row,) = ask("select * from penstock.queued_jobs")
    assert row["data"] == '{"n": 1, "tags": ["a", "b"]}'
    assert (row["key"], row["priority"], row["unique_key"]) == ("acme", 5, "only")
    assert row["run_after"].isoformat() == "2040-01-01T00:00:00+00:00"
    assert str(row["id"]) == "00000000-0000-4000-8000-000000000001"
    assert ask("select * from penstock.staged_jobs") == []


def test_ids_make_a_repeated_write_harmless(spark: SparkSession, url: str, ask: Ask) -> None:
    frame = spark.sql("select uuid_of(id) as id, named_struct('n', id) as data from range(50)".replace(
        "uuid_of(id)", "format_string('00000000-0000-4000-8000-%012d', id)"))  # fmt: skip
    write(frame, url)
    write(frame, url)
    assert jobs(ask) == list(range(50))


def test_a_named_writer_writes_an_epoch_once(spark: SparkSession, url: str, ask: Ask) -> None:
    frame = spark.sql("select named_struct('n', id) as data from range(20)")
    for epoch in ("0", "0", "1"):
        write(frame, url, writer="nightly", epoch=epoch)
    assert jobs(ask) == sorted([*range(20), *range(20)])


def test_tasks_that_fail_and_run_again_count_once(spark: SparkSession, url: str, ask: Ask, tmp_path: Path) -> None:
    marks = str(tmp_path)

    def stumble(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        yield from batches
        # Each task fails twice, after it has handed on all of its rows.
        if context is not None and context.attemptNumber() < 2:
            (Path(marks) / f"{context.partitionId()}.{context.attemptNumber()}").touch()
            raise RuntimeError("on purpose")

    frame = spark.range(0, 400, 1, 2).selectExpr("to_json(named_struct('n', id)) as data").mapInArrow(stumble, "data string")
    write(frame, url)
    assert len(list(tmp_path.iterdir())) == 4
    assert jobs(ask) == list(range(400))


def test_a_write_that_fails_leaves_nothing(spark: SparkSession, url: str, ask: Ask) -> None:
    frame = spark.sql("select if(id < 15, to_json(named_struct('n', id)), '{broken') as data from range(20)")
    with pytest.raises(Exception, match="data that is no JSON"):
        write(frame, url)
    assert jobs(ask) == []
    assert ask("select * from penstock.staged_jobs") == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select 1 as data", "the column data is int"),
        ("select '{}' as data, 1 as color", "no column color"),
        ("select 'x' as key", "data is missing"),
        ("select '{}' as data, 'x' as priority", "the column priority is string"),
        ("select '{}' as data, 'bad id' as id", "an id that is no UUID"),
        ("select '{}' as data, cast(500 as int) as priority", "priority"),
        ("select cast(null as string) as data", "no data"),
    ],
)
def test_what_is_no_job_is_refused(spark: SparkSession, url: str, ask: Ask, query: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        write(spark.sql(query), url)
    assert jobs(ask) == []


def test_micro_batches_are_enqueued_once_also_when_spark_forgets_the_commit(
    spark: SparkSession, url: str, ask: Ask, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()

    def run() -> None:
        stream = spark.readStream.schema("n int").json(str(source)).selectExpr("named_struct('n', n) as data")
        query = (
            stream.writeStream.format("penstock").option("url", url).option("job", "t")
            .option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(240), "the query did not end in time"
        assert query.exception() is None

    for batch in range(2):
        (source / f"{batch}.json").write_text("\n".join(f'{{"n": {batch * 10 + n}}}' for n in range(10)))
        run()
    # As if the driver had died between the sink's commit and Spark's note of it.
    for note in (checkpoint / "commits").glob("*1*"):
        note.unlink()
    run()
    assert jobs(ask) == list(range(20))


def test_the_epoch_is_what_prevents_the_second_copy(spark: SparkSession, url: str, ask: Ask, tmp_path: Path) -> None:
    """The same, sabotaged: without the note of the epoch the batch comes twice, so the test above tests something."""
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()
    (source / "0.json").write_text('{"n": 1}')
    for _ in range(2):
        stream = spark.readStream.schema("n int").json(str(source)).selectExpr("named_struct('n', n) as data")
        query = (
            stream.writeStream.format("penstock").option("url", url).option("job", "t")
            .option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(240), "the query did not end in time"
        for note in (checkpoint / "commits").glob("*0*"):
            note.unlink()
        ask("delete from penstock.sink_epochs")
    assert jobs(ask) == [1, 1]


def test_another_checkpoint_under_the_name_of_a_writer_is_refused(
    spark: SparkSession, url: str, ask: Ask, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()

    def run(checkpoint: str, **options: str) -> Any:
        stream = spark.readStream.schema("n int").json(str(source)).selectExpr("named_struct('n', n) as data")
        query = (
            stream.writeStream.format("penstock").options(url=url, job="t", **options)
            .option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(240), "the query did not end in time"
        return query

    (source / "0.json").write_text('{"n": 1}')
    first = run("one", writer="copies")
    (note,) = ask("select query, target, epoch, offsets from penstock.sink_epochs")
    assert (note["query"], note["target"], note["epoch"]) == (first.id, "job t", 0)
    assert json.loads(note["offsets"])[0]["logOffset"] == 0
    (source / "1.json").write_text('{"n": 2}')
    # A batch 0 of another query is not the batch 0 that was written.
    with pytest.raises(Exception, match="copies is written to job t by the query"):
        run("two", writer="copies")
    assert jobs(ask) == [1]
    run("one", writer="copies")
    assert jobs(ask) == [1, 2]

    # In foreachBatch the number is that of the query's batch too.
    def each(checkpoint: str) -> None:
        def put(frame: DataFrame, batch: int) -> None:
            write(frame.selectExpr("named_struct('n', n) as data"), url, writer="each", epoch=str(batch))

        stream = spark.readStream.schema("n int").json(str(source))
        writing = stream.writeStream.foreachBatch(put).option("checkpointLocation", str(tmp_path / checkpoint))
        assert writing.trigger(availableNow=True).start().awaitTermination(240), "the query did not end in time"

    each("three")
    with pytest.raises(Exception, match="each is written to job t by the query"):
        each("four")
    assert jobs(ask) == [1, 1, 2, 2]


def test_each_way_that_the_refusal_advises_works(spark: SparkSession, url: str, ask: Ask, tmp_path: Path) -> None:
    """But for the first, to go on with the checkpoint, of which the test above is."""
    ask("select penstock.create_stream('a', 4)")

    def append(first: int) -> None:
        ask(
            "select count(*) from penstock.append_many('a', array(select json_build_object('n', n)"
            " from generate_series($1::integer, $1::integer + 9) n), array(select n::text from generate_series(1, 10) n))",
            first,
        )

    def run(checkpoint: str, starting: str = "earliest", **options: str) -> None:
        stream = spark.readStream.format("penstock").schema("n int").options(url=url, subscribe="a", startingOffsets=starting)
        query = (
            stream.load().selectExpr("named_struct('n', n) as data").writeStream.format("penstock")
            .options(url=url, job="t", checkpointLocation=str(tmp_path / checkpoint), **options)
            .trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(240), "the query did not end in time"

    append(0)
    run("one", writer="copies")
    append(10)
    with pytest.raises(Exception, match="copies is written to job t by the query") as refused:
        run("two", writer="copies")
    assert jobs(ask) == list(range(10))
    # Another name, or none: everything is written.
    run("three", writer="other")
    run("four")
    assert Counter(jobs(ask)) == Counter([*range(10), *range(20), *range(20)])
    ask("delete from penstock.queued_jobs where (data ->> 'n')::integer < 10")
    # Taking over, with the command that the refusal names: what the other one had not written.
    command = re.search(r"penstock (streams writers takeover) '(copies)'", str(refused.value))
    assert command, str(refused.value)
    taken = penstock(url, *command[1].split(), command[2])
    run("five", taken.stdout.splitlines()[-1], writer="copies")
    assert Counter(jobs(ask)) == Counter([*range(10, 20), *range(10, 20), *range(10, 20)])
    with pytest.raises(Exception, match="copies is written to job t by the query"):
        run("one", writer="copies")
