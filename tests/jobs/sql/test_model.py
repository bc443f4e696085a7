"""The SQL protocol against a model in memory: random calls, and after each one the tables hold what the model says.

The clock is held and moved by the test, so time is part of the random input. Hypothesis prints how to repeat a failure.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from penstock.testing import TemporaryDatabases

# New ids are made by the real clock, and an id from the future is refused.
START = datetime.now(UTC)
VISIBILITY = timedelta(minutes=5)
ATTEMPTS = {"plain": 3, "once": 1, "limited": 3}
CONCURRENCY = {"limited": 2}
NAMES = st.sampled_from(sorted(ATTEMPTS))


@dataclass
class Job:
    """What the model knows of a job."""

    name: str
    priority: int
    run_after: datetime
    expires_at: datetime | None
    unique: str | None
    order: int | None  # place in the ready line; None: deferred
    attempt: int = 1
    status: str = "queued"
    lease_ends: datetime | None = None
    coalesces: bool = False
    cancel_requested: bool = False


@dataclass(frozen=True)
class Held:
    """What a worker holds of a claim."""

    id: uuid.UUID
    attempt: int
    lease: int


class Protocol(RuleBasedStateMachine):
    """The rules. `connection` is set by the test."""

    connection: psycopg.Connection[Any]

    @initialize()
    def begin(self) -> None:
        self.now = START
        self.jobs: dict[uuid.UUID, Job] = {}
        self.held: list[Held] = []
        self.paused: set[str] = set()
        self.places = 0
        for table in ("queued_jobs", "leases", "archived_jobs", "type_priorities", "jobs", "listeners"):
            self.connection.execute(f"truncate penstock.{table} cascade")
        self.set_clock()
        self.call("select penstock.create_job_type('plain', '{\"max_attempts\": 3, \"backoff_jitter\": 0}')")
        self.call("select penstock.create_job_type('once', '{\"delivery_strategy\": \"at_most_once\"}')")
        self.call('select penstock.create_job_type(\'limited\', \'{"max_attempts": 3, "concurrency": 2, "backoff_jitter": 0}\')')

    def call(self, statement: str, *arguments: Any) -> list[Any]:
        cursor = self.connection.execute(statement, arguments)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []

    def set_clock(self) -> None:
        self.call("select set_config('penstock.clock', %s, false)", self.now.isoformat())

    def next_place(self) -> int:
        self.places += 1
        return self.places

    def due(self, job: Job) -> bool:
        return job.expires_at is not None and job.expires_at <= self.now

    # -- what clients do

    @rule(
        name=NAMES,
        priority=st.sampled_from([0, 0, -5, 5]),
        delay=st.sampled_from([0, 0, 0, 30]),
        expiry=st.sampled_from([None, None, 20, 400]),
        unique=st.sampled_from([None, None, "a", "b"]),
        again=st.integers(0, 10),
    )
    def enqueue(self, name: str, priority: int, delay: int, expiry: int | None, unique: str | None, again: int) -> None:
        known = list(self.jobs)
        id = known[again % len(known)] if again > 7 and known else uuid.uuid4()
        run_after = self.now + timedelta(seconds=delay) if delay else None
        expires_at = self.now + timedelta(seconds=expiry) if expiry else None
        rows = self.call(
            "select id, outcome from penstock.enqueue_many(%s, array['{}'::jsonb], array[%s::uuid], null, array[%s::smallint],"
            " array[%s::timestamptz], array[%s::timestamptz], array[%s::text])",
            name, id, priority, run_after, expires_at, unique,
        )  # fmt: skip
        seen = rows[0] if rows else (id, "queued")
        holder = next((k for k, j in self.jobs.items() if j.name == name and unique and j.unique == unique and j.coalesces), None)
        if id in self.jobs:
            finished = self.jobs[id].status not in ("queued", "in-progress")
            assert seen == (id, "taken" if self.jobs[id].name != name else "archived" if finished else "duplicate")
        elif holder is not None:
            assert seen == (holder, "coalesced")
        else:
            assert seen == (id, "queued")
            order = None if delay else self.next_place()
            self.jobs[id] = Job(name, priority, run_after or self.now, expires_at, unique, order, coalesces=unique is not None)

    @rule(seconds=st.sampled_from([1, 5, 31, 299]))
    def time_passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)
        self.set_clock()

    # -- what workers do

    def expire_model(self) -> None:
        for job in self.jobs.values():
            if job.status == "queued" and self.due(job):
                job.status, job.coalesces, job.attempt = "expired", False, job.attempt - 1

    @rule(name=NAMES, limit=st.integers(1, 4))
    def claim(self, name: str, limit: int) -> None:
        rows = self.call("select id, attempt, lease from penstock.claim('w', array[%s], %s)", name, limit)
        self.expire_model()
        if name in self.paused:
            assert rows == []
            return
        if name in CONCURRENCY:
            running = sum(job.status == "in-progress" and job.name == name for job in self.jobs.values())
            limit = min(limit, CONCURRENCY[name] - running)
        ready = [(j.priority, j.order, id) for id, j in self.jobs.items() if j.name == name and j.status == "queued" and j.order]
        expected = [id for _, _, id in sorted(ready)[: max(limit, 0)]]
        # The answer says which jobs are claimed; within a batch its rows come in the order in which they are stored.
        assert {row[0] for row in rows} == set(expected) and len(rows) == len(expected)
        for id, attempt, lease in sorted(rows, key=lambda row: expected.index(row[0])):
            job = self.jobs[id]
            assert job.attempt == attempt
            job.status, job.lease_ends, job.coalesces = "in-progress", self.now + VISIBILITY, False
            self.held.append(Held(id, attempt, lease))

    @rule(
        which=st.integers(0, 50),
        outcome=st.sampled_from(["succeeded", "failed", "failed-for-good", "cancelled", "released"]),
        wrong=st.sampled_from(["", "", "", "attempt", "lease"]),
    )
    def settle(self, which: int, outcome: str, wrong: str) -> None:
        if not self.held:
            return
        held = self.held[which % len(self.held)]
        given = replace(held, attempt=held.attempt + (wrong == "attempt"), lease=held.lease + 1_000_000 * (wrong == "lease"))
        rows = self.call(
            "select outcome from penstock.settle(array[%s::uuid], array[%s::smallint], array[%s::bigint], array[%s])",
            given.id, given.attempt, given.lease, outcome,
        )  # fmt: skip
        seen = rows[0][0] if rows else "succeeded"
        job = self.jobs[held.id]
        mine = wrong == "" and job.status == "in-progress" and held == self.last_held(held.id)
        if not mine:
            assert seen == "stale"
            return
        self.held.remove(held)
        assert seen == self.end(job, outcome)

    def last_held(self, id: uuid.UUID) -> Held | None:
        return next((held for held in reversed(self.held) if held.id == id), None)

    def end(self, job: Job, outcome: str, *, at_once: bool = False) -> str:
        """What the model makes of the end of an attempt."""
        if outcome == "succeeded":
            job.status = "succeeded"
            return "succeeded"
        if outcome == "cancelled" or job.cancel_requested:
            job.status = "cancelled"
            return "cancelled"
        if outcome == "released":
            job.status = "queued"
            self.coalesce_again(job)
            return "released"
        if outcome == "failed-for-good" or job.attempt == ATTEMPTS[job.name]:
            job.status = "failed"
            return "failed"
        job.run_after = self.now + timedelta(seconds=0 if at_once else 2**job.attempt)
        job.status, job.attempt = "queued", job.attempt + 1
        job.order = job.order if at_once else None
        self.coalesce_again(job)
        return "retried"

    def coalesce_again(self, job: Job) -> None:
        taken = any(other.coalesces and other.name == job.name and other.unique == job.unique for other in self.jobs.values())
        job.coalesces = job.unique is not None and not taken

    @rule(which=st.integers(0, 50))
    def extend(self, which: int) -> None:
        if not self.held:
            return
        held = self.held[which % len(self.held)]
        rows = self.call(
            "select lease from penstock.extend(array[%s::uuid], array[%s::smallint], array[%s::bigint])",
            held.id, held.attempt, held.lease,
        )  # fmt: skip
        job = self.jobs[held.id]
        if job.status == "in-progress" and held == self.last_held(held.id):
            self.held[self.held.index(held)] = replace(held, lease=rows[0][0])
            job.lease_ends = self.now + VISIBILITY
        else:
            assert rows == []

    @rule()
    def promote(self) -> None:
        self.call("select penstock.promote()")
        waiting = [
            (j.run_after, id) for id, j in self.jobs.items() if j.status == "queued" and not j.order and j.run_after <= self.now
        ]
        places = {row[0]: row[1] for row in self.call("select id, seq from penstock.queued_jobs where seq is not null")}
        # Jobs that became due together have no order among themselves: take the one that the database chose.
        for _, id in sorted(waiting, key=lambda pair: places[pair[1]]):
            self.jobs[id].order = self.next_place()

    @rule()
    def expire(self) -> None:
        self.call("select penstock.expire()")
        self.expire_model()

    @rule()
    def recover(self) -> None:
        lost = [j for j in self.jobs.values() if j.status == "in-progress" and j.lease_ends and j.lease_ends < self.now]
        assert self.call("select penstock.recover()") == [(len(lost),)]
        # Of two that share a unique key only one can coalesce again, and the database chooses which.
        for job in lost:
            self.end(job, "failed", at_once=True)
        for id, coalesces in self.call("select id, coalesces from penstock.queued_jobs"):
            self.jobs[id].coalesces = coalesces

    # -- what people do

    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        if not self.jobs:
            return
        id = list(self.jobs)[which % len(self.jobs)]
        job = self.jobs[id]
        ((seen,),) = self.call("select penstock.cancel(%s)", id)
        if job.status == "queued":
            job.status, job.coalesces, job.attempt = "cancelled", False, job.attempt - 1
            assert seen == "cancelled"
        elif job.status == "in-progress":
            job.cancel_requested = True
            assert seen == "cancelling"
        else:
            assert seen == job.status

    @rule(which=st.integers(0, 50))
    def replay(self, which: int) -> None:
        if not self.jobs:
            return
        id = list(self.jobs)[which % len(self.jobs)]
        job = self.jobs[id]
        if job.status == "queued":
            with pytest.raises(psycopg.Error) as caught:
                self.call("select penstock.replay(%s, p_force => true)", id)
            assert caught.value.sqlstate == "PS409"
            return
        ((copy,),) = self.call("select penstock.replay(%s, p_force => true)", id)
        self.jobs[copy] = Job(job.name, job.priority, self.now, job.expires_at, None, self.next_place())

    @rule(name=NAMES)
    def pause_or_resume(self, name: str) -> None:
        self.call(f"select penstock.{'resume' if name in self.paused else 'pause'}(%s)", name)
        self.paused ^= {name}

    # -- what always holds

    @invariant()
    def tables_say_what_the_model_says(self) -> None:
        rows = self.call(
            "select id, status::text, attempt from penstock.queued_jobs"
            " union all select id, status::text, attempt from penstock.archived_jobs"
        )
        assert len(rows) == len(self.jobs)
        assert {row[0]: (row[1], row[2]) for row in rows} == {id: (job.status, job.attempt) for id, job in self.jobs.items()}

    @invariant()
    def leases_count_what_is_in_progress(self) -> None:
        rows = self.call(
            "select lease, count(*) from penstock.queued_jobs where status = 'in-progress' group by lease order by 1"
        )
        assert rows == self.call("select id, open_jobs from penstock.leases order by 1")


@pytest.fixture
def connection(databases: TemporaryDatabases) -> Iterator[psycopg.Connection[Any]]:
    with databases.database() as url, psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.mark.timeout(400)  # As many calls as chance gives, each with a look at all tables.
def test_the_protocol_does_what_the_model_says(connection: psycopg.Connection[Any]) -> None:
    Protocol.connection = connection
    run_state_machine_as_test(
        Protocol,
        settings=settings(max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )
