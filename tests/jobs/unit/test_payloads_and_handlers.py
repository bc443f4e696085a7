"""Payloads are checked on the way in and out; handlers say where they run."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from penstock import Conflict, InvalidInput, Job, Penstock, PenstockError, Retry
from penstock.core.records import from_object
from penstock.core.serialization import Codec, load_json
from penstock.jobs.handler import kind_of
from penstock.jobs.http_models import Result
from penstock.jobs.records import parse_id
from penstock.jobs.signature import signature_of_handler


class Model(BaseModel):
    n: int


@dataclass
class Data:
    n: int


class Typed(TypedDict):
    n: int


@pytest.mark.parametrize(
    ("type_", "value", "text"),
    [
        (Model, Model(n=1), '{"n":1}'),
        (Data, Data(1), '{"n":1}'),
        (Typed, {"n": 1}, '{"n":1}'),
        (Any, {"n": [1, None, "ä"]}, '{"n":[1,null,"ä"]}'),
        (int, 5, "5"),
        (Any, "a backslash and \\u0000", '"a backslash and \\\\u0000"'),
    ],
)
def test_a_payload_travels_as_json_and_comes_back(type_: Any, value: Any, text: str) -> None:
    codec: Codec[Any] = Codec(type_, "test")
    assert codec.dump(value) == text
    assert codec.load(text) == value


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (Model, {"n": "x"}),
        (Data, 5),
        (Any, {"f": lambda: 1}),
        (Any, {1, 2}),
        (Any, "nul \x00"),
        (str, "nul \x00"),
        (Any, "\\\x00"),
        (Any, "\ud800"),
        (int, "five"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused(type_: Any, value: Any) -> None:
    with pytest.raises(InvalidInput):
        Codec(type_, "test").dump(value)


def test_a_job_gives_the_payload_its_type() -> None:
    def typed(job: Job[Data]) -> None: ...
    def plain(job: Job) -> None: ...  # type: ignore[type-arg]

    assert signature_of_handler(typed)[0].payload is Data
    assert signature_of_handler(plain)[0].payload is Any


def plain(job: Job[Any]) -> None: ...


def test_an_async_handler_runs_on_the_loop() -> None:
    async def awaits(job: Job[Any]) -> None: ...

    with pytest.raises(InvalidInput):
        kind_of(awaits, "process")
    assert [kind_of(awaits, "auto"), kind_of(plain, "auto"), kind_of(plain, "process")] == ["async", "thread", "process"]


def test_a_type_is_declared_once() -> None:
    app = Penstock("postgresql://localhost/none")
    app.job_type("ship")
    with pytest.raises(InvalidInput, match="twice"):
        app.job_type("ship")


def test_errors_survive_pickling_and_say_what_to_do() -> None:
    error = pickle.loads(pickle.dumps(PenstockError("no", hint="do this")))
    assert str(error) == "no\ndo this"
    retry = pickle.loads(pickle.dumps(Retry("later", after=timedelta(seconds=3))))
    assert (retry.message, retry.after) == ("later", timedelta(seconds=3))


def test_a_job_without_a_worker_says_so() -> None:
    from datetime import UTC, datetime

    job = Job(parse_id("job_0190b7a0-0000-7000-8000-000000000001"), "x", None, 1, 1, {}, datetime.now(UTC))
    assert not job.cancelled
    with pytest.raises(Conflict):
        job.progress(1)


@pytest.mark.parametrize("digits", [18, 19, 20, 21, 40, 300])
def test_whole_numbers_of_any_length_are_read_exactly_wherever_they_stand(digits: int) -> None:
    number = int("1234567890"[: digits % 10] + "1234567890" * (digits // 10))
    for before in range(40):
        assert load_json(f'["{"é" * before}", {number}, "x"]')[1] == number


def test_the_errors_of_a_job_are_read_whatever_they_are() -> None:
    answer = {
        "id": "job_282227eb-3c76-4ef7-af7e-25dff933077f",
        "status": "failed",
        "result": None,
        "errors": ["boom", {"attempt": 1}],
    }
    assert from_object(Result, answer).errors == ["boom", {"attempt": 1}]
