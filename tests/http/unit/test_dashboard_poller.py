"""The poller of the dashboard: whose turn it is, what is shared and kept, and when something is read again."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from penstock.errors import DatabaseUnavailable
from penstock.http.dashboard import poller as poller_module
from penstock.http.dashboard.pacing import SHARE, Changes, Marks, Pace
from penstock.http.dashboard.poller import Poller
from penstock.http.errors import ApiError
from penstock.postgres.translation import StatementCancelled
from tests.http.nowhere import poller_of_nowhere
from tests.waiting import eventually


class Source:
    """What is read: a value, or an error, when it is let go."""

    def __init__(self, value: Any = 1, error: Exception | None = None, *, slow: bool = False) -> None:
        self.value = value
        self.error = error
        self.calls = self.running = 0
        self.go = asyncio.Event()
        if not slow:
            self.go.set()

    def __repr__(self) -> str:
        return "source"


async def content_of(_: Any, source: Source, number: int = 0) -> Any:
    source.calls += 1
    source.running += 1
    try:
        value = source.value
        await source.go.wait()
        if source.error is not None:
            raise source.error
        return value
    finally:
        source.running -= 1


class Clock:
    """The monotonic clock of the poller, which stands still between its advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10_000.0
        monkeypatch.setattr("penstock.http.dashboard.poller.time", self)

    def monotonic(self) -> float:
        return self.now

    def advance(self, by_s: float) -> None:
        self.now += by_s


def tasks_of(poller: Poller, source: Source, numbers: range, user: str) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(poller.read(content_of, source, number, user=user)) for number in numbers]


@pytest.mark.parametrize("kind", ["lambda", "closure", "partial", "method"])
async def test_a_reading_is_made_by_a_function_that_has_nothing_but_its_key(kind: str) -> None:
    secret = Source("of a user")

    async def closure(_: Any) -> Any:
        return secret.value

    calls: dict[str, Any] = {
        "lambda": lambda _: closure(_), "closure": closure, "partial": partial(content_of, source=secret),
        "method": secret.__repr__,
    }  # fmt: skip
    with pytest.raises(TypeError, match="not in the key"):
        await poller_of_nowhere().read(calls[kind])


async def test_a_failure_is_not_kept_and_the_next_request_reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    poller, source = poller_of_nowhere(), Source(error=StatementCancelled("cancelled after 2 s", hint="ask for less"))
    for calls in (1, 2, 3):
        with pytest.raises(StatementCancelled, match="cancelled after 2 s"):
            await poller.read(content_of, source)
        assert source.calls == calls
    source.error = None
    reading, _ = await poller.read(content_of, source)
    assert (reading.value, reading.problem) == (1, None)


async def test_what_was_read_before_is_shown_with_the_failure_and_read_again_by_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Clock(monkeypatch)
    poller, source = poller_of_nowhere(), Source()
    await poller.read(content_of, source)
    time.advance(400)
    source.error = DatabaseUnavailable("away")
    for calls in (2, 3):
        reading, _ = await poller.read(content_of, source)
        assert (reading.value, reading.problem, source.calls) == (1, "away", calls)
    source.error = None
    assert (await poller.read(content_of, source))[0].problem is None


async def test_a_storm_of_requests_shares_the_failing_reading_under_way() -> None:
    poller, source = poller_of_nowhere(), Source(error=DatabaseUnavailable("too long"), slow=True)
    storm = [asyncio.create_task(poller.read(content_of, source, user=f"user {n % 7}")) for n in range(100)]
    await eventually(lambda: source.running == 1, "the reading")
    late = [asyncio.create_task(poller.read(content_of, source, user="late")) for _ in range(100)]
    await asyncio.sleep(0)
    source.go.set()
    results = await asyncio.gather(*storm, *late, return_exceptions=True)
    assert [str(result) for result in results] == ["too long"] * 200
    assert source.calls == 1


async def test_one_thing_at_a_time_is_read_for_a_user_and_others_do_not_wait_for_it() -> None:
    poller, slow = poller_of_nowhere(), Source(slow=True)
    greedy = tasks_of(poller, slow, range(20), "greedy")
    await eventually(lambda: slow.running, "the first reading")
    # The overview of another user, of which the greedy one waits to read a part too.
    shared = Source("shared")
    waits = asyncio.create_task(poller.read(content_of, shared, user="greedy"))
    await asyncio.sleep(0)
    for number in range(13):
        assert (await poller.read(content_of, shared if number == 0 else Source(number), user="other"))[0].value is not None
    assert (slow.running, slow.calls) == (1, 1)
    assert not waits.done()
    slow.go.set()
    await asyncio.gather(*greedy, waits)
    assert slow.calls == 20
    assert shared.calls == 1, "what was read meanwhile is not read again"


async def test_so_many_readings_of_a_user_wait_and_no_more() -> None:
    poller, slow = poller_of_nowhere(), Source(slow=True)
    tasks = tasks_of(poller, slow, range(60), "greedy")
    refused = [task for task in tasks if (await _settled(task)) is not None]
    assert len(refused) == 60 - poller_module.MOST_WAITING
    error = refused[0].exception()
    assert isinstance(error, ApiError) and error.status == 429 and "wait already" in error.message
    slow.go.set()
    await asyncio.gather(*(task for task in tasks if task not in refused))
    assert (await poller.read(content_of, Source(2), user="greedy"))[0].value == 2


async def _settled(task: asyncio.Task[Any]) -> BaseException | None:
    for _ in range(5):
        await asyncio.sleep(0)
    return task.exception() if task.done() else None


async def test_a_reading_that_all_have_left_is_given_up_and_its_turn_passed_on() -> None:
    poller, slow = poller_of_nowhere(), Source(slow=True)
    first, second = tasks_of(poller, slow, range(2), "greedy")
    await eventually(lambda: slow.running, "the first reading")
    joined = asyncio.create_task(poller.read(content_of, slow, 0, user="other"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    assert (slow.running, slow.calls) == (1, 1), "another user waits for it"
    joined.cancel()
    await eventually(lambda: slow.calls == 2, "the turn of the second")
    slow.go.set()
    assert (await second)[0].value == 1
    assert (await poller.read(content_of, slow, 0, user="greedy"))[0].value == 1
    assert slow.calls == 3


async def test_what_changes_while_it_is_read_is_read_again() -> None:
    poller, source = poller_of_nowhere(), Source("before", slow=True)
    first = asyncio.create_task(poller.read(content_of, source, user="another"))
    await eventually(lambda: source.running, "the reading")
    source.value = "after"
    poller.changed()
    source.go.set()
    assert (await first)[0].value == "before"
    assert (await poller.read(content_of, source))[0].value == "after"
    source.value = "later"
    assert (await poller.read(content_of, source))[0].value == "after", "it is kept"


async def test_what_no_user_looks_at_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    poller, time, source = poller_of_nowhere(), Clock(monkeypatch), Source()
    for number in range(20):
        await poller.read(content_of, source, number)
    time.advance(200.0)
    await poller.read(content_of, source, 20)
    time.advance(200.0)
    await poller.read(content_of, source, 21)
    assert len(poller) == 2


async def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller_module, "MOST_BYTES", 1 << 20)
    poller = poller_of_nowhere()
    for number in range(50):
        source = Source([{"text": "x" * 100_000}])
        assert (await poller.read(content_of, source, number))[0].value == source.value
    assert 5 < len(poller) <= 10
    assert 0 < poller.bytes <= 1 << 20
    # What is larger than all that may be kept is shown, and not kept.
    assert len((await poller.read(content_of, Source("y" * (2 << 20))))[0].value) == 2 << 20
    assert poller.bytes <= 1 << 20


def test_a_reading_takes_its_share_however_often_jobs_change() -> None:
    pace, now, cost, readings = Pace(2.0, follows=True), 1_000.0, 0.05, 0
    for second in range(10_000):
        if now + second >= pace.due(second):
            pace.done(now + second, cost, second)
            readings += 1
    assert readings * cost <= 10_000 / SHARE + 6 * cost


def test_a_dear_reading_is_due_at_once_when_jobs_change_after_a_while() -> None:
    pace, now, cost = Pace(2.0, follows=True), 1_000.0, 0.05
    for _ in range(10):
        pace.done(now, cost, 1)
        now = pace.due(1)
    pace.done(now, cost, 1)
    assert pace.due(1) - now > SHARE * cost
    for version in (2, 3):
        assert pace.due(version) - now <= 1.0
        now = pace.due(version)
        pace.done(now, cost, version)


def test_a_reading_that_follows_nothing_is_kept_for_four_hundred_times_its_cost() -> None:
    pace = Pace(3.0, follows=False)
    pace.done(1_000.0, 0.05, 1)
    assert pace.due(2) == 1_020.0
    pace.done(1_000.0, 0.001, 1)
    assert pace.due(2) == 1_003.0
    pace.done(1_000.0, 10.0, 1)
    assert pace.due(2) == 1_300.0


def test_the_end_of_a_transaction_that_had_made_its_mark_is_a_change_too() -> None:
    changes, versions = Changes(), []
    for place, snapshot in (
        (1, "10:10:"), (1, "11:11:"), (2, "11:14:11,13"), (2, "11:15:11,13"), (2, "11:15:11"), (2, "11:16:11"), (2, "16:16:"),
        (2, "17:17:"),
    ):  # fmt: skip
        changes.note(Marks((place,), snapshot))
        versions.append(changes.version)
    assert versions == [0, 0, 1, 1, 2, 2, 3, 3]
