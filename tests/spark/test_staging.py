"""The staged write of jobs as tasks and the driver do it, without a JVM."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from penstock.errors import Conflict, InvalidInput
from penstock.spark import sink
from penstock.spark.options import WriteOptions

Ask = Callable[..., list[Any]]
pytestmark = pytest.mark.no_jvm


def staged(url: str, job: str, **columns: list[Any]) -> sink.Staged:
    return sink.stage(WriteOptions(url, job, None, 0), "w", 0, iter([pa.RecordBatch.from_pydict(columns)]))


def test_ids_are_of_version_7_in_the_order_of_the_rows() -> None:
    made = [UUID(bytes=one) for one in sink.ids(300_000).to_pylist()]
    assert {one.version for one in made} == {7} and {one.variant for one in made} == {"specified in RFC 4122"}
    assert made == sorted(set(made))


def test_jobs_of_a_pool_get_their_slots(url: str, ask: Ask) -> None:
    ask("select penstock.declare_pool('p', '{\"slots\": 8}')")
    keys = [f"k{n}" for n in range(40)]
    message = staged(url, "p", data=["{}"] * 40, key=keys)
    sink.commit(url, "w", 0, [message])
    rows = ask("select key, slot, penstock.slot_of(key, 8) as wanted from penstock.queued_jobs order by seq")
    assert [row["key"] for row in rows] == keys
    assert all(row["slot"] == row["wanted"] for row in rows)
    with pytest.raises(InvalidInput, match="no key"):
        sink.commit(url, "w", 1, [staged(url, "p", data=["{}"])])


def test_an_attempt_that_does_not_count_is_left_out_and_swept_away(url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")
    staged(url, "t", data=['{"n": 1}'] * 7)
    counts = staged(url, "t", data=['{"n": 2}'] * 5, priority=pa.array([3, 3, None, 3, 0], pa.int16()).to_pylist())
    sink.commit(url, "w", 0, [counts])
    assert [row["n"] for row in ask("select (data ->> 'n')::integer as n from penstock.queued_jobs")] == [2] * 5
    assert ask("select * from penstock.staged_jobs") == []


def test_staged_rows_that_a_crash_has_emptied_are_missed(url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")
    message = staged(url, "t", data=["{}"] * 3)
    ask("delete from penstock.staged_jobs where place = 1")
    with pytest.raises(Conflict, match="2 of 3 staged"):
        sink.commit(url, "w", 0, [message])
    assert ask("select * from penstock.sink_epochs") == []


def test_structs_become_json_with_what_is_in_them() -> None:
    kind = pa.struct([
        ("labels", pa.map_(pa.string(), pa.int64())), ("list", pa.list_(pa.map_(pa.string(), pa.string()))),
        ("price", pa.decimal128(10, 2)), ("raw", pa.binary()), ("none", pa.string()),
    ])  # fmt: skip
    row = {"labels": [("a", 1)], "list": [[("b", "c")]], "price": Decimal("1.10"), "raw": b"\xff", "none": None}
    assert sink.as_json(pa.array([row, None], kind)).to_pylist() == [
        '{"labels":{"a":1},"list":[{"b":"c"}],"price":1.10,"raw":"/w==","none":null}',
        None,
    ]
    assert sink.as_json(pa.array([[("a", [("b", 1)])]], pa.map_(pa.string(), pa.map_(pa.string(), pa.int64())))).to_pylist() == [
        '{"a":{"b":1}}'
    ]
