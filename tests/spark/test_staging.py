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
    message = staged(url, "p", data=["{}"] * 40, key=keys)
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
        # What the user can do, and where the other one ended.
        assert all(word in str(refused.value.hint) for word in ("checkpoint", "another name", '"0": 4', "forget_writer"))
    write("one", 5)
    assert ask("select penstock.forget_writer('nightly', 'job t') as n")[0]["n"] == 1
    write("two", 0)
    write("two", 0)
    assert ask("select count(*) as n from penstock.queued_jobs")[0]["n"] == 3
    (note,) = ask("select query, epoch, offsets from penstock.sink_epochs")
    assert (note["query"], note["epoch"], note["offsets"]) == ("two", 0, '[{"a": {"0": 0}}]')


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
            sink.job_writer(JobWriteOptions.parse({"url": "x", "job": "t", **options}), text, False)
    with pytest.raises(InvalidInput, match="no option epoch"):
        sink.job_stream_writer(JobWriteOptions.parse({"url": "x", "job": "t", "writer": "w", "epoch": "1"}), text, False)
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
