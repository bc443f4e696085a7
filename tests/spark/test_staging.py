"""The staged write of jobs as tasks and the driver do it, without a JVM."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import asyncpg
import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from penstock.errors import Conflict, InvalidInput
from penstock.spark import writing
from penstock.spark.jobs import sink
from penstock.spark.jobs.options import JobWriteOptions
from penstock.spark.json.to_json import as_json
from penstock.spark.source import PenstockSource
from penstock.spark.staging import Batch
from penstock.spark.streams import sink as stream_sink
from penstock.spark.streams.options import EventWriteOptions

Ask = Callable[..., list[Any]]
pytestmark = pytest.mark.no_jvm


BATCH = Batch("w", "job t", 0)


def staged(url: str, job: str, of: Batch = BATCH, **columns: list[Any]) -> writing.Staged:
    return sink.stage(JobWriteOptions(url=url, job=job), of, iter([pa.RecordBatch.from_pydict(columns)]))


def test_ids_are_of_version_7_in_the_order_of_the_rows() -> None:
    made = [UUID(bytes=one) for one in sink.ids(300_000).to_pylist()]
    assert {one.version for one in made} == {7} and {one.variant for one in made} == {"specified in RFC 4122"}
    assert made == sorted(set(made))


def test_jobs_of_a_pool_get_their_slots(url: str, ask: Ask) -> None:
    ask("select penstock.declare_pool('p', '{\"slots\": 8}')")
    keys = [f"k{n}" for n in range(40)]
    message = staged(url, "p", Batch("w", "job p", 0), data=["{}"] * 40, key=keys)
    writing.commit(url, [message])
    rows = ask("select key, slot, penstock.slot_of(key, 8) as wanted from penstock.queued_jobs order by seq")
    assert [row["key"] for row in rows] == keys
    assert all(row["slot"] == row["wanted"] for row in rows)
    with pytest.raises(InvalidInput, match="no key"):
        writing.commit(url, [staged(url, "p", data=["{}"], of=Batch("w", "job p", 1))])


def test_an_attempt_that_does_not_count_is_left_out_and_swept_away(url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")
    staged(url, "t", data=['{"n": 1}'] * 7)
    counts = staged(url, "t", data=['{"n": 2}'] * 5, priority=pa.array([3, 3, None, 3, 0], pa.int16()).to_pylist())
    writing.commit(url, [counts])
    assert [row["n"] for row in ask("select (data ->> 'n')::integer as n from penstock.queued_jobs")] == [2] * 5
    assert ask("select * from penstock.staged_jobs") == []


def test_staged_rows_that_a_crash_has_emptied_are_missed(url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")
    message = staged(url, "t", data=["{}"] * 3)
    ask("delete from penstock.staged_jobs where place = 1")
    with pytest.raises(Conflict, match="2 of 3 staged"):
        writing.commit(url, [message])
    assert ask("select * from penstock.sink_epochs") == []


def test_a_number_is_written_once_to_each_target(url: str, ask: Ask) -> None:
    """As with Delta's txnAppId and txnVersion, which are for each table: two job types and a stream under one name and number."""
    ask("select penstock.create_job_type(name) from unnest('{t,u}'::text[]) as name")
    ask("select penstock.create_stream('b', 2)")
    for _ in range(2):
        # All three stage before one commits: no commit clears away what another one needs.
        jobs = [staged(url, job, data=["{}"] * 3, of=Batch("nightly", f"job {job}", 7)) for job in ("t", "u")]
        frame = pa.RecordBatch.from_pydict({"value": ["{}"] * 5})
        events = stream_sink.stage(EventWriteOptions(url=url, stream="b"), Batch("nightly", "stream b", 7), iter([frame]))
        for message in jobs:
            writing.commit(url, [message])
        writing.commit(url, [events], events=True)
    assert {row["name"]: row["n"] for row in ask("select name, count(*) as n from penstock.queued_jobs group by name")} == {
        "t": 3, "u": 3,
    }  # fmt: skip
    assert ask("select sum(next_offset) as n from penstock.stream_bounds('b')")[0]["n"] == 5
    assert [ask(f"select count(*) as n from penstock.staged_{what}")[0]["n"] for what in ("jobs", "events")] == [0, 0]


def test_a_name_belongs_to_the_query_that_wrote_under_it(url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")

    def write(query: str | None, epoch: int) -> None:
        message = staged(url, "t", data=["{}"], of=Batch("nightly", "job t", epoch, query))
        writing.commit(url, [message], offsets=f'[{{"a": {{"0": {epoch}}}}}]')

    write("one", 4)
    for query, epoch in (("two", 0), ("two", 9), (None, 9)):
        with pytest.raises(Conflict, match="nightly is written to job t by the query one, up to batch 4") as refused:
            write(query, epoch)
        # What the user can do.
        assert all(
            word in str(refused.value.hint)
            for word in ("checkpoint", "another name", "penstock streams writers takeover 'nightly'")
        )
    write("one", 5)
    assert ask("select penstock.forget_writer('nightly', 'job t') as n")[0]["n"] == 1
    write("two", 0)
    write("two", 0)
    assert ask("select count(*) as n from penstock.queued_jobs")[0]["n"] == 3
    (note,) = ask("select query, epoch, offsets from penstock.sink_epochs")
    assert (note["query"], note["epoch"], note["offsets"]) == ("two", 0, '[{"a": {"0": 0}}]')


def test_each_target_that_a_column_names_has_a_note_of_its_own(url: str, ask: Ask) -> None:
    """Two frames under one name and number, each with a column that says what its rows are for: the second is not lost."""
    ask("select penstock.create_job_type(name) from unnest('{t,u,v}'::text[]) as name")
    ask("select penstock.create_stream(name, 2) from unnest('{a,b}'::text[]) as name")

    def write(*names: str) -> writing.Staged:
        frame = pa.RecordBatch.from_pydict({"name": list(names), "data": ["{}"] * len(names)})
        return sink.stage(JobWriteOptions(url=url), Batch("nightly", "jobs", 7), iter([frame]))

    def append(*names: str) -> writing.Staged:
        frame = pa.RecordBatch.from_pydict({"topic": list(names), "value": ["{}"] * len(names)})
        return stream_sink.stage(EventWriteOptions(url=url), Batch("nightly", "streams", 7), iter([frame]))

    for _ in range(2):
        writing.commit(url, [write("t", "u", "t")])
        # What has got the number is left out, and the rest is written.
        again = write("u", "v")
        for _ in range(2):  # also when the answer of the first commit was lost
            writing.commit(url, [again])
        writing.commit(url, [staged(url, "v", data=["{}"], of=Batch("nightly", "job v", 7))])
        writing.commit(url, [append("a")], events=True)
        writing.commit(url, [append("b", "a", "b")], events=True)
    found = ask("select name, count(*) as n from penstock.queued_jobs group by name")
    assert {row["name"]: row["n"] for row in found} == {"t": 2, "u": 1, "v": 1}
    ends = {name: ask("select sum(next_offset) as n from penstock.stream_bounds($1)", name)[0]["n"] for name in "ab"}
    assert ends == {"a": 1, "b": 2}
    notes = {row["target"]: row["jobs"] for row in ask("select target, jobs from penstock.sink_epochs where target like '% %'")}
    assert notes == {"job t": 2, "job u": 1, "job v": 1, "stream a": 1, "stream b": 2}
    assert [ask(f"select count(*) as n from penstock.staged_{what}")[0]["n"] for what in ("jobs", "events")] == [0, 0]


def test_rows_of_a_target_that_is_not_named_are_refused(url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type(name) from unnest('{t,u}'::text[]) as name")
    ask("select penstock.create_stream(name, 1) from unnest('{a,b}'::text[]) as name")
    stage = "insert into penstock.staged_jobs (writer, part, place, name, data) values ('w', '1.x.y', $1, $2, '{}')"
    ask(stage, 1, "t")
    ask(stage, 2, "u")
    ask(
        "insert into penstock.staged_events (writer, part, place, stream, width, partition, events, data)"
        " select 'w', '1.x.y', 1, name, 1, 0, 1, '{1}' from unnest('{a,b}'::text[]) as name"
    )
    one = '{"%s": {"rows": 1}}'
    for call, one_name in (("commit_staged", "u"), ("commit_staged_events", "b")):
        named, kind = ("t", "job") if call == "commit_staged" else ("a", "stream")
        for target, given, message in (
            (f"{kind} {named}", None, f"for {one_name}, which the write"),
            (f"{kind}s", one % named, f"for {one_name}, which the write"),
            (f"{kind} {named}", one % one_name, "something else"),
            (f"{kind}s", None, "not said which"),
        ):
            with pytest.raises(asyncpg.PostgresError, match=message) as refused:
                ask(f"select penstock.{call}('w', 1, '{{1.x.y}}', 1, $1, p_named => $2::jsonb)", target, given)
            assert refused.value.sqlstate == "PS400"
    assert ask("select * from penstock.queued_jobs") == ask("select * from penstock.sink_epochs") == []
    assert ask("select sum(next_offset) as n from penstock.stream_bounds('a')")[0]["n"] == 0


def test_a_stream_that_is_created_again_in_between_is_noticed(url: str, ask: Ask) -> None:
    def append() -> writing.Staged:
        frame = pa.RecordBatch.from_pydict({"topic": ["a"], "value": ["{}"]})
        return stream_sink.stage(EventWriteOptions(url=url), Batch("w", "streams", 7), iter([frame]))

    ask("select penstock.create_stream('a', 2)")
    first = append()
    ask("select penstock.drop_stream('a')")
    ask("select penstock.create_stream('a', 2)")
    with pytest.raises(Conflict, match="stream a was dropped and created again"):
        writing.commit(url, [first], events=True)
    # Also between two tasks of one batch.
    second = append()
    with pytest.raises(Conflict, match="stream a was dropped and created again"):
        writing.commit(url, [first, second], events=True)
    assert ask("select * from penstock.sink_epochs") == []
    writing.commit(url, [second], events=True)
    assert ask("select sum(next_offset) as n from penstock.stream_bounds('a')")[0]["n"] == 1


def test_numbers_that_json_does_not_have_are_text(url: str, ask: Ask) -> None:
    """As Spark's `to_json` writes them: its `from_json` reads them back as numbers, and a null would be another value."""
    odd = [float("nan"), float("inf"), float("-inf"), 1.5, None]
    kind = pa.struct([
        ("n", pa.float64()), ("f", pa.float32()), ("list", pa.list_(pa.float64())), ("of", pa.struct([("n", pa.float64())])),
        ("map", pa.map_(pa.string(), pa.float64())),
    ])  # fmt: skip
    values = [{"n": n, "f": n, "list": [1.0, n], "of": {"n": n}, "map": [("k", n)]} for n in odd]
    words = ['"NaN"', '"Infinity"', '"-Infinity"', "1.5", "null"]
    assert as_json(pa.array(values, kind)).to_pylist() == [
        f'{{"n":{n},"f":{n},"list":[1.0,{n}],"of":{{"n":{n}}},"map":{{"k":{n}}}}}' for n in words
    ]
    ask("select penstock.create_job_type('t')")
    message = sink.stage(
        JobWriteOptions(url=url, job="t"), BATCH, iter([pa.RecordBatch.from_arrays([pa.array(values, kind)], ["data"])])
    )
    writing.commit(url, [message])
    rows = ask("select data -> 'n' as n from penstock.queued_jobs order by seq")
    assert [row["n"] for row in rows] == words


def test_a_job_with_a_time_that_no_client_can_read_is_refused_by_its_row(url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")
    late = 253_402_300_800_000_000
    times = pa.array([0, None, late], pa.timestamp("us", tz="UTC"))
    data = pa.array(["{}"] * 3)
    for name in ("run_after", "expires_at"):
        frames = [pa.RecordBatch.from_arrays([data], ["data"]), pa.RecordBatch.from_arrays([data, times], ["data", name])]
        with pytest.raises(InvalidInput, match=f"{name} of row 5 of the task is out of range: {late}"):
            sink.stage(JobWriteOptions(url=url, job="t"), BATCH, iter(frames[::1]))
    structs = pa.StructArray.from_arrays([times], ["at"])
    with pytest.raises(InvalidInput, match="row 2 of the task has a date or a time"):
        sink.stage(JobWriteOptions(url=url, job="t"), BATCH, iter([pa.RecordBatch.from_arrays([structs], ["data"])]))
    assert ask("select * from penstock.staged_jobs") == []


def test_two_roles_do_not_meet_under_a_name(url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")
    role = f"writer_{secrets.token_hex(4)}"
    ask(f"create role {role} login")
    try:
        ask("select penstock.grant_access($1, 'producer')", role)
        other = urlunsplit(urlsplit(url)._replace(netloc=f"{role}@{urlsplit(url).netloc.rpartition('@')[2]}"))
        for one in (url, other, other):
            writing.commit(one, [staged(one, "t", data=["{}"])])
        assert ask("select count(*) as n from penstock.queued_jobs")[0]["n"] == 2
        # Nor does one forget what the other has written.
        asyncio.run(_as(other, "select penstock.forget_writer('w')"))
        assert [row["role"] for row in ask("select role from penstock.sink_epochs")] != [role]
    finally:
        ask(f"drop owned by {role}")
        ask(f"drop role {role}")


async def _as(url: str, query: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(query)
    finally:
        await connection.close()


def test_a_name_and_a_number_come_together() -> None:
    text = StructType([StructField("data", StringType())])
    for options, message in (({"writer": "w"}, "needs the option epoch"), ({"epoch": "1"}, "needs the option writer")):
        with pytest.raises(InvalidInput, match=message):
            PenstockSource({"url": "x", "job": "t", **options}).writer(text, False)
    with pytest.raises(InvalidInput, match="no option epoch"):
        PenstockSource({"url": "x", "job": "t", "writer": "w", "epoch": "1"}).streamWriter(text, False)
    for options, hint in (({"epohc": "1"}, "Is it epoch?"), ({"zzz": "1"}, "There are: url"), ({"path": "p"}, "without one")):
        with pytest.raises(InvalidInput) as refused:
            JobWriteOptions.parse({"url": "x", "job": "t", **options})
        assert hint in str(refused.value.hint)
    with pytest.raises(InvalidInput, match="no option steam"):
        EventWriteOptions.parse({"url": "x", "topic": "t", "steam": "u"})


def test_structs_become_json_with_what_is_in_them() -> None:
    kind = pa.struct([
        ("labels", pa.map_(pa.string(), pa.int64())), ("list", pa.list_(pa.map_(pa.string(), pa.string()))),
        ("price", pa.decimal128(10, 2)), ("raw", pa.binary()), ("none", pa.string()),
    ])  # fmt: skip
    row = {"labels": [("a", 1)], "list": [[("b", "c")]], "price": Decimal("1.10"), "raw": b"\xff", "none": None}
    assert as_json(pa.array([row, None], kind)).to_pylist() == [
        '{"labels":{"a":1},"list":[{"b":"c"}],"price":1.10,"raw":"/w==","none":null}',
        None,
    ]
    assert as_json(pa.array([[("a", [("b", 1)])]], pa.map_(pa.string(), pa.map_(pa.string(), pa.int64())))).to_pylist() == [
        '{"a":{"b":1}}'
    ]
