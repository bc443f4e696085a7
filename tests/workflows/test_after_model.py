"""Jobs that wait for jobs, against a model in memory: random calls, some in a transaction that stays open beside the others.

After each resolve the tables hold what the model says. Hypothesis prints how to repeat a failure.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from penstock.testing import TemporaryDatabases

ENDED = ("succeeded", "failed", "cancelled")


@dataclass
class Job:
    """What the model knows of a job."""

    after: set[uuid.UUID] = field(default_factory=set)
    at_any_end: bool = False
    status: str = "queued"


class Dependencies(RuleBasedStateMachine):
    """The rules. `connection` and `other`, which holds the open transaction, are set by the test."""

    connection: psycopg.Connection[Any]
    other: psycopg.Connection[Any]

    @initialize()
    def begin(self) -> None:
        self.other.rollback()
        self.jobs: dict[uuid.UUID, Job] = {}
        self.held: dict[uuid.UUID, tuple[int, int]] = {}
        self.uncommitted: dict[uuid.UUID, Job] = {}
        self.locked: set[uuid.UUID] = set()
        tables = ("queued_jobs", "leases", "archived_jobs", "jobs", "waiting_jobs", "job_dependencies", "workflow_ticks")
        self.call(f"truncate {', '.join(f'penstock.{table}' for table in tables)} cascade")
        self.call("select penstock.create_job_type('step', '{\"max_attempts\": 1}')")

    def call(self, statement: str, *arguments: Any) -> list[Any]:
        cursor = self.connection.execute(statement, arguments)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []

    def chosen(self, which: list[int], jobs: dict[uuid.UUID, Job]) -> set[uuid.UUID]:
        known = list(jobs)
        return {known[number % len(known)] for number in which} if known else set()

    @rule(which=st.lists(st.integers(0, 30), max_size=3), at_any_end=st.booleans(), beside=st.booleans())
    def enqueue(self, which: list[int], at_any_end: bool, beside: bool) -> None:
        """Enqueue a job after some others, in a transaction of its own or in the one that stays open."""
        visible = {**self.jobs, **self.uncommitted} if beside else self.jobs
        after = self.chosen(which, visible)
        id = uuid.uuid4()
        connection = self.other if beside else self.connection
        connection.execute(
            "select penstock.enqueue('step', p_id => %s, p_after => %s, p_when => %s)",
            (id, list(after) or None, "finished" if at_any_end and after else None),
        )
        job = Job(after, at_any_end, "waiting" if after else "queued")
        if beside:
            self.uncommitted[id] = job
            self.locked |= after - set(self.held)
        else:
            self.jobs[id] = job

    @rule(commit=st.booleans())
    def end_transaction(self, commit: bool) -> None:
        if commit:
            self.other.commit()
            self.jobs |= self.uncommitted
        else:
            self.other.rollback()
        self.uncommitted, self.locked = {}, set()

    @rule(limit=st.integers(1, 3))
    def claim(self, limit: int) -> None:
        for id, attempt, lease in self.call("select id, attempt, lease from penstock.claim('w', '{step}', %s)", limit):
            assert id not in self.locked
            self.follow()
            assert self.jobs[id].status == "queued"
            self.jobs[id].status = "in-progress"
            self.held[id] = attempt, lease

    @rule(which=st.integers(0, 30), outcome=st.sampled_from(["succeeded", "succeeded", "failed", "cancelled"]))
    def settle(self, which: int, outcome: str) -> None:
        if not self.held:
            return
        id = list(self.held)[which % len(self.held)]
        attempt, lease = self.held.pop(id)
        self.call(
            "select * from penstock.settle(array[%s::uuid], array[%s::smallint], array[%s::bigint], array[%s])",
            id, attempt, lease, outcome,
        )  # fmt: skip
        self.jobs[id].status = outcome

    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        for id in self.chosen([which], self.jobs) - self.locked - set(self.held):
            # A waiting job may have been released, or cancelled, already in the model alone.
            ((seen,),) = self.call("select penstock.cancel(%s)", id)
            if seen == "cancelled" and self.jobs[id].status in ("waiting", "queued"):
                self.jobs[id].status = "cancelled"

    @rule()
    def resolve(self) -> None:
        while self.call("select penstock.resolve_workflows()") != [(0,)]:
            pass
        self.follow()
        rows = self.call(
            "select id, 'waiting' from penstock.waiting_jobs union all select id, status::text from penstock.queued_jobs"
            " union all select id, status::text from penstock.archived_jobs"
        )
        assert len(rows) == len(self.jobs)
        for id, status in rows:
            # What the open transaction has locked is left for later.
            assert status == self.jobs[id].status or (id in self.locked or self.behind_locked(id)), (id, status, self.jobs[id])
        if not self.locked and not self.uncommitted:
            assert self.call("select count(*) from penstock.workflow_ticks") == [(0,)]
            assert self.call("select count(*) from penstock.job_dependencies where not linked") == [(0,)]

    def behind_locked(self, id: uuid.UUID) -> bool:
        return any(other in self.locked or self.behind_locked(other) for other in self.jobs[id].after)

    def follow(self) -> None:
        """What follows from the ends so far, in the model."""
        changed = True
        while changed:
            changed = False
            for job in self.jobs.values():
                if job.status != "waiting":
                    continue
                ends = [self.jobs[other].status for other in job.after]
                if not job.at_any_end and any(status in ("failed", "cancelled") for status in ends):
                    job.status, changed = "cancelled", True
                elif all(status in ENDED for status in ends):
                    job.status, changed = "queued", True

    def teardown(self) -> None:
        """Everything that can run runs, and nothing is left waiting."""
        if not hasattr(self, "jobs"):
            return
        self.end_transaction(True)
        for _ in range(len(self.jobs) + 2):
            self.resolve()
            self.claim(3)
            for _ in list(self.held):
                self.settle(0, "succeeded")
            for job in self.jobs.values():
                assert job.status != "in-progress"
        self.resolve()
        assert all(job.status in ENDED for job in self.jobs.values()), self.jobs


@pytest.fixture
def connections(databases: TemporaryDatabases) -> Iterator[tuple[psycopg.Connection[Any], psycopg.Connection[Any]]]:
    with (
        databases.database() as url,
        psycopg.connect(url, autocommit=True, options="-c lock_timeout=20s") as connection,
        psycopg.connect(url, options="-c lock_timeout=20s") as other,
    ):
        yield connection, other


@pytest.mark.timeout(400)  # As many calls as chance gives.
def test_waiting_jobs_do_what_the_model_says(connections: tuple[psycopg.Connection[Any], psycopg.Connection[Any]]) -> None:
    Dependencies.connection, Dependencies.other = connections
    run_state_machine_as_test(
        Dependencies,
        settings=settings(max_examples=100, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )
