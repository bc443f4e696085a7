"""A query with a new checkpoint takes over from one that writes to Penstock: each event is written once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import InvalidInput
from penstock.spark.streams.options import EventReadOptions
from penstock.spark.streams.source import EventStreamReader
from tests.command_line import penstock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Ask = Callable[..., list[Any]]


@pytest.fixture
def append(ask: Ask) -> Callable[[str, int], None]:
    """Appends ten events with the numbers from one on, over all partitions."""

    def append(stream: str, first: int) -> None:
        ask(
            "select count(*) from penstock.append_many($1, array(select json_build_object('n', n) from"
            " generate_series($2::integer, $2::integer + 9) n), array(select n::text from generate_series(1, 10) n))",
            stream,
            first,
        )

    return append


def written(ask: Ask, job: str = "t") -> list[int]:
    """The numbers of the jobs of a type, sorted."""
    return [
        row["n"] for row in ask("select (data ->> 'n')::integer as n from penstock.queued_jobs where name = $1 order by 1", job)
    ]


def source(spark: SparkSession, url: str, starting: str, **options: str) -> DataFrame:
    stream = spark.readStream.format("penstock").schema("n int").options(url=url, startingOffsets=starting, **options)
    return stream.load().selectExpr("named_struct('n', n) as data")


def takeover(url: str, *arguments: str) -> dict[str, Any]:
    found = penstock(url, "streams", "writers", "takeover", *arguments, "--json")
    assert found.returncode == 0, found.stdout + found.stderr
    taken: dict[str, Any] = json.loads(found.stdout)
    return taken


def test_events_of_partitions_and_streams_that_came_since_the_last_batch_are_written_once(
    spark: SparkSession, url: str, ask: Ask, append: Callable[[str, int], None], tmp_path: Path
) -> None:
    ask("select penstock.create_job_type('t')")
    ask("select penstock.create_stream('ship.a', 2)")

    def run(checkpoint: str, starting: str) -> None:
        query = (
            source(spark, url, starting, subscribePattern=r"ship\..*").writeStream.format("penstock")
            .options(url=url, job="t", writer="copies", checkpointLocation=str(tmp_path / checkpoint))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(240), "the query did not end in time"

    append("ship.a", 0)
    run("one", "earliest")
    append("ship.a", 10)
    ask("select penstock.grow_stream('ship.a', 6)")
    append("ship.a", 20)
    ask("select penstock.create_stream('ship.b', 3)")
    append("ship.b", 30)
    with pytest.raises(Exception, match="copies is written to job t by the query") as refused:
        run("two", "earliest")
    command = re.search(r"penstock (streams writers takeover) '(\w+)'", str(refused.value))
    assert command, str(refused.value)
    taken = takeover(url, command[2])
    with pytest.raises(Exception, match="copies was handed over after batch"):
        run("one", "earliest")
    # Until the new query has written, the command may be repeated.
    assert takeover(url, "copies") == taken
    (starting,) = taken["starting"]
    run("three", json.dumps(starting))
    assert written(ask) == list(range(40))
    append("ship.b", 40)
    run("three", json.dumps(starting))
    assert written(ask) == list(range(50))
    with pytest.raises(Exception, match="copies is written to job t by the query"):
        run("one", "earliest")


@pytest.mark.no_jvm
def test_an_offset_that_a_checkpoint_does_not_name_begins_at_the_beginning_and_what_retention_took_of_it_is_told(
    url: str, ask: Ask, append: Callable[[str, int], None]
) -> None:
    from pyspark.sql.types import StructType

    ask("select penstock.create_stream('a', 2)")
    append("a", 0)

    def initial(starting: str, **options: str) -> dict[str, Any]:
        given = {"url": url, "subscribe": "a", "startingOffsets": starting, **options}
        return EventStreamReader(EventReadOptions.parse(given), StructType().add("offset", "long")).initialOffset()

    of_checkpoint = initial("latest")
    ask("select penstock.grow_stream('a', 4)")
    append("a", 10)
    ends = {row["partition"]: row["next_offset"] for row in ask("select * from penstock.stream_bounds('a')")}
    assert ends[2] + ends[3] > 0
    found = initial(json.dumps(of_checkpoint))["a"]
    assert found == {**of_checkpoint["a"], "2": 0, "3": 0}
    # Offsets that a person writes begin elsewhere as without the option, here at the latest.
    by_hand = initial(json.dumps({"a": of_checkpoint["a"]}))["a"]
    assert by_hand == {**of_checkpoint["a"], "2": ends[2], "3": ends[3]}


def test_a_query_that_writes_in_for_each_batch_is_taken_over_at_its_last_batch(
    spark: SparkSession, url: str, ask: Ask, append: Callable[[str, int], None], tmp_path: Path
) -> None:
    for name in ("t", "u"):
        ask("select penstock.create_job_type($1)", name)
    ask("select penstock.create_stream('a', 2)")
    fails = False

    def run(checkpoint: str, starting: str, *, record: bool) -> None:
        place = str(tmp_path / checkpoint)

        def put(frame: DataFrame, batch: int) -> None:
            options = {"url": url, "writer": "totals", "epoch": str(batch)} | ({"checkpointLocation": place} if record else {})
            frame.write.format("penstock").options(job="t", **options).mode("append").save()
            if fails:
                raise RuntimeError("the driver fails between its writes")
            frame.write.format("penstock").options(job="u", **options).mode("append").save()

        writing = source(spark, url, starting, subscribe="a").writeStream.foreachBatch(put)
        writing = writing.option("checkpointLocation", place).trigger(availableNow=True)
        assert writing.start().awaitTermination(240), "the query did not end in time"

    append("a", 0)
    run("one", "earliest", record=False)
    # Where it has read is not recorded, but is in the checkpoint.
    refused = penstock(url, "streams", "writers", "takeover", "totals")
    assert refused.returncode == 1 and "--checkpoint FOLDER" in refused.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metadata").write_text('{"id":"8d3c4f0e-0000-4000-8000-000000000000"}')
    refused = penstock(url, "streams", "writers", "takeover", "totals", "--checkpoint", str(tmp_path / "other"))
    assert refused.returncode == 1 and "is the checkpoint of the query 8d3c4f0e" in refused.stderr
    append("a", 10)
    ask("select penstock.grow_stream('a', 5)")
    append("a", 20)
    taken = takeover(url, "totals", "--checkpoint", str(tmp_path / "one"))
    run("two", json.dumps(taken["starting"][0]), record=True)
    assert written(ask, "t") == written(ask, "u") == list(range(30))

    # A crash between the two writes: no beginning is right for both.
    append("a", 30)
    fails = True
    with pytest.raises(Exception, match="fails between its writes"):
        run("two", "earliest", record=True)
    fails = False
    refused = penstock(url, "streams", "writers", "takeover", "totals")
    assert refused.returncode == 1
    assert re.search(r"stands at batch \d+ of job u, and at batch \d+ of job t", refused.stderr) and "--repeat" in refused.stderr
    # The way back: once more with its checkpoint.
    run("two", "earliest", record=True)
    assert written(ask, "t") == written(ask, "u") == list(range(40))
    append("a", 40)
    run("three", json.dumps(takeover(url, "totals")["starting"][0]), record=True)
    assert written(ask, "t") == written(ask, "u") == list(range(50))
    # The other way back, when the checkpoint is lost: one target has a batch twice, and none lacks it.
    append("a", 50)
    fails = True
    with pytest.raises(Exception, match="fails between its writes"):
        run("three", "earliest", record=True)
    fails = False
    taken = takeover(url, "totals", "--repeat")
    assert taken["again"] == ["job t"]
    run("four", json.dumps(taken["starting"][0]), record=True)
    assert written(ask, "u") == list(range(60))
    assert written(ask, "t") == sorted([*range(60), *range(50, 60)])


@pytest.mark.no_jvm
def test_what_cannot_be_taken_over_is_refused_in_words(url: str, ask: Ask) -> None:
    note = "select penstock.note_epoch($1, $2, $3, 1, $4, $5::jsonb)"
    ask(note, "nightly", "job t", 4, None, None)
    ask(note, "half", "job t", 4, "q", '[{"a": {"0": 4}}]')
    ask(note, "half", "job u", 4, "q", '[{"a": {"0": 4}}]')

    def refused(*arguments: str) -> str:
        found = penstock(url, "streams", "writers", *arguments)
        assert found.returncode == 1, found.stdout
        return " ".join(found.stderr.split())

    assert "no query of this role writes under the name missing" in refused("takeover", "missing")
    assert "nightly is the name of batch writes" in refused("takeover", "nightly")
    assert takeover(url, "half")["starting"] == [{"a": {"0": 4}}]
    ask(note, "half", "job t", 0, "new", "[null]")
    assert "has been taken over by the query new for job t, and not yet for job u" in refused("takeover", "half")
    # Meanwhile neither the old query nor a batch write has what was handed over.
    for query in ("q", None):
        with pytest.raises(Exception, match="half was handed over after batch 4 of the query q"):
            ask(note, "half", "job u", 5, query, None)
    listed = {
        (row["writer"], row["target"]): row for row in json.loads(penstock(url, "streams", "writers", "list", "--json").stdout)
    }
    assert listed["half", "job u"]["handed_over"] and not listed["half", "job t"]["handed_over"]
    assert penstock(url, "streams", "writers", "forget", "half").returncode == 0
    assert "under the name half" in refused("forget", "half")


@pytest.mark.no_jvm
def test_a_query_that_still_writes_is_not_handed_over(url: str, ask: Ask) -> None:
    ask("select penstock.note_epoch('w', 'job t', 5, 1, 'q', null)")
    with pytest.raises(Exception, match="writer w stands at batch 5 of job t, and not at 4"):
        ask("""select penstock.hand_over_writer('w', '{"job t": 4}')""")
    with pytest.raises(Exception, match="stands at batch 5 of job t, and not at none"):
        ask("""select penstock.hand_over_writer('w', '{"job u": 4}')""")
    with pytest.raises(Exception, match="it is not said where writer 'w' stands"):
        ask("select penstock.hand_over_writer('w', '[]')")
    assert ask("select handed_over from penstock.sink_epochs")[0]["handed_over"] is False


@pytest.mark.no_jvm
def test_a_write_whose_rows_name_their_targets_stands_at_one_batch(url: str, ask: Ask) -> None:
    """Batches without rows for one of the targets are no sign of a crash."""
    call = "select penstock.note_targets('w', 'jobs', $1, $2, $3::jsonb, 'q', $4::jsonb)"
    ask(call, 1, 2, '{"t": {"rows": 1}, "u": {"rows": 1}}', '[{"a": {"0": 1}}]')
    ask(call, 2, 1, '{"t": {"rows": 1}}', '[{"a": {"0": 2}}]')
    ask(call, 3, 0, "{}", '[{"a": {"0": 3}}]')
    taken = takeover(url, "w")
    assert (taken["batch"], taken["starting"], taken["again"]) == (3, [{"a": {"0": 3}}], [])


def test_offsets_of_a_checkpoint_are_the_only_ones_that_name_all(url: str) -> None:
    options = EventReadOptions.parse({"url": url, "subscribe": "a", "startingOffsets": '{"a": {"0": 1}, "@streams": {}}'})
    assert options.whole == {"startingOffsets"}
    with pytest.raises(InvalidInput):
        EventReadOptions.parse({"url": url, "subscribe": "a", "startingOffsets": '{"a": 1, "@streams": {}}'})
