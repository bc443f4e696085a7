"""Key queues: jobs of a key one after the other, whatever comes of them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from uuid import UUID

import pytest

from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.pools.key_queues import KeyQueues

NOW = datetime.now(UTC)


class Bench:
    """Key queues whose jobs are started and settled by hand."""

    def __init__(self, concurrency: int = 1, blocking: bool = True) -> None:
        self.started: list[int] = []
        self.ahead: list[int] = []
        self.settled: list[Settlement] = []
        self.freed = 0
        self.mine = True
        self.queues = KeyQueues(
            concurrency,
            blocking,
            self.start,
            self.settled.append,
            lambda _: self.mine,
            self.free,
        )

    def start(self, job: ClaimedJob, _at: float, _may: object, ahead: bool) -> None:
        self.started.append(job.seq)
        if ahead:
            self.ahead.append(job.seq)

    def free(self) -> None:
        self.freed += 1

    def submit(self, *seqs: int, key: str = "a") -> None:
        jobs = [(ClaimedJob(UUID(int=n), "w", 5, 5, 0, key, "{}", NOW, NOW, n, 1, 300.0), 0) for n in seqs]
        self.queues.submit(jobs, time.monotonic())

    def end(self, seq: int, outcome: Outcome = Outcome.SUCCEEDED) -> Settlement:
        result = Settlement(UUID(int=seq), 5, 1, outcome)
        self.queues.finished(result)
        return result

    def released(self) -> list[int]:
        return [s.id.int for s in self.settled if s.outcome is Outcome.RELEASED]

    def write_all(self, outcomes: dict[UUID, str] | None = None) -> None:
        settled = list(self.settled)
        self.settled.clear()
        self.queues.written(settled, outcomes or {})


def test_the_next_starts_when_the_one_before_ended_well() -> None:
    bench = Bench()
    bench.submit(2, 1, 3)
    assert bench.started == [1]
    bench.end(1)
    assert bench.started == [1, 2]
    bench.end(2)
    bench.end(3)
    bench.write_all()
    assert len(bench.queues) == 0


def test_a_turn_of_a_heavy_key_goes_on_ahead_of_the_others() -> None:
    bench = Bench()
    jobs = [(ClaimedJob(UUID(int=n), "w", 5, 5, 0, "a", "{}", NOW, NOW, n, 1, 300.0), 0) for n in range(1, 8)]
    bench.queues.submit(jobs, time.monotonic(), {"a": 3})
    for n in range(1, 7):
        bench.end(n)
    # Three are a turn; the first of each waits for its place like any other.
    assert (bench.started, bench.ahead) == ([1, 2, 3, 4, 5, 6, 7], [2, 3, 5, 6])


def test_other_keys_do_not_wait() -> None:
    bench = Bench()
    bench.submit(1, 2)
    bench.submit(3, key="b")
    assert bench.started == [1, 3]


def test_a_failure_hands_back_what_waits_and_what_comes_before_it_is_written() -> None:
    bench = Bench()
    bench.submit(1, 2, 3)
    bench.end(1, Outcome.FAILED)
    assert bench.released() == [2, 3]
    bench.submit(4)
    assert bench.released() == [2, 3, 4]
    bench.write_all()
    bench.submit(1, 2)
    assert bench.started == [1, 1]


def test_a_failure_lets_others_pass_where_retries_skip() -> None:
    bench = Bench(blocking=False)
    bench.submit(1, 2)
    bench.end(1, Outcome.FAILED)
    assert bench.started == [1, 2]


def test_what_was_claimed_past_a_job_that_runs_again_is_handed_back() -> None:
    bench = Bench()
    bench.submit(1, 2)
    assert bench.queues.running_low() == ["a"]
    # The claim is under way; meanwhile 1 fails, and all of the queue is written.
    bench.end(1, Outcome.FAILED)
    bench.write_all()
    assert len(bench.queues) == 0
    bench.submit(3)
    assert bench.started == [1]
    assert bench.released() == [3]


def test_what_was_claimed_past_a_queue_that_ended_well_runs() -> None:
    bench = Bench()
    bench.submit(1, 2)
    assert bench.queues.running_low() == ["a"]
    bench.end(1)
    bench.end(2)
    bench.write_all()
    bench.submit(3)
    assert bench.started == [1, 2, 3]


def test_what_commits_late_goes_behind_what_is_held_though_its_number_is_lower() -> None:
    bench = Bench()
    bench.submit(1, 5, 7)
    bench.end(1)
    assert bench.queues.running_low() == ["a"]
    bench.submit(8, 2)
    for n in (5, 7, 2):
        bench.end(n)
    assert bench.started == [1, 5, 7, 2, 8]


def test_a_job_that_is_claimed_while_an_earlier_attempt_still_ends_here_is_handed_back() -> None:
    bench = Bench()
    bench.submit(1, 2)
    bench.submit(1)
    assert bench.started == [1]
    assert bench.released() == [2, 1]
    bench.end(1)
    bench.write_all()
    assert len(bench.queues) == 0
    bench.submit(1, 2)
    assert bench.started == [1, 1]


def test_a_stale_result_closes_the_queue() -> None:
    bench = Bench()
    bench.submit(1, 2, 3)
    first = bench.end(1)
    bench.write_all({first.id: "stale"})
    assert bench.started == [1, 2]
    assert bench.released() == [3]


def test_nothing_starts_in_a_slot_that_is_not_ours() -> None:
    bench = Bench()
    bench.submit(1, 2)
    bench.mine = False
    bench.end(1)
    assert bench.started == [1]
    assert bench.released() == [2]


def test_a_lost_slot_is_forgotten_and_late_results_of_it_change_nothing() -> None:
    bench = Bench()
    bench.submit(1, 2)
    first = bench.end(1)
    assert bench.queues.drop(0) == [UUID(int=2)]
    assert len(bench.queues) == 0
    bench.submit(1)
    bench.queues.written([first], {})
    assert bench.queues.holds(first.id), "the new attempt was taken for the old one"


@pytest.mark.parametrize("concurrency", [1, 3])
def test_as_many_of_a_key_run_as_may(concurrency: int) -> None:
    bench = Bench(concurrency)
    bench.submit(1, 2, 3, 4, 5)
    assert len(bench.started) == concurrency
