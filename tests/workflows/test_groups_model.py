"""Job groups against a model in memory: random calls, some in a transaction that stays open beside the others.

Groups lie in groups, gain children before and after the seal, fail, and are cancelled. After everything that follows was done the
tables hold what the model says. Hypothesis prints how to repeat a failure.
"""

from __future__ import annotations

import uuid
from collections import Counter
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
PICK = st.integers(0, 30)


@dataclass
class Job:
    """What the model knows of a job.

    `after` is the group of which it is the `then`. `cancelling`: it runs, and its handler is told to stop.
    """

    group: uuid.UUID | None
    status: str = "queued"
    after: uuid.UUID | None = None
    cancelling: bool = False


@dataclass
class Group:
    """What the model knows of a job group."""

    parent: uuid.UUID | None
    on_failure: str
    then: uuid.UUID | None = None
    sealed: bool = False
    cancelled: bool = False
    status: str | None = None
    adding: int = field(default=0)
    """Children of the open transaction, until whose end the group does not end."""

    @property
    def takes_children(self) -> bool:
        return self.status is None and not self.cancelled


class Groups(RuleBasedStateMachine):
    """The rules. `connection` and `other`, which holds the open transaction, are set by the test."""

    connection: psycopg.Connection[Any]
    other: psycopg.Connection[Any]

    @initialize()
    def begin(self) -> None:
        self.other.rollback()
        self.jobs: dict[uuid.UUID, Job] = {}
        self.groups: dict[uuid.UUID, Group] = {}
        self.held: dict[uuid.UUID, tuple[int, int]] = {}
        self.uncommitted: dict[uuid.UUID, Job] = {}
        tables = (
            "queued_jobs", "leases", "archived_jobs", "jobs", "waiting_jobs", "job_dependencies", "workflow_ticks", "job_groups",
            "operations",
        )  # fmt: skip
        self.call(f"truncate {', '.join(f'penstock.{table}' for table in tables)} cascade")
        self.call("select penstock.create_job_type('step', '{\"max_attempts\": 1}')")

    def call(self, statement: str, *arguments: Any) -> list[Any]:
        cursor = self.connection.execute(statement, arguments)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []

    def group_at(self, which: int) -> uuid.UUID | None:
        return list(self.groups)[which % len(self.groups)] if self.groups else None

    @rule(nested=st.booleans(), which=PICK, on_failure=st.sampled_from(["cancel", "continue"]), then=st.booleans())
    def open_group(self, nested: bool, which: int, on_failure: str, then: bool) -> None:
        parent = self.group_at(which) if nested else None
        if parent is not None and not self.groups[parent].takes_children:
            with pytest.raises(psycopg.Error, match="takes no more children"):
                self.call("select penstock.open_group(%s, p_parent => %s)", f"group-{uuid.uuid4()}", parent)
            return
        name = f"group-{uuid.uuid4()}"
        statement = "select penstock.open_group(%s, %s, '{}', %s, %s)"
        ((id,),) = self.call(statement, name, "step" if then else None, on_failure, parent)
        assert self.call(statement, name, "step" if then else None, on_failure, parent) == [(id,)]
        self.groups[id] = Group(parent, on_failure)
        if then:
            ((job,),) = self.call("select then_job from penstock.job_groups where id = %s", id)
            self.groups[id].then = job
            self.jobs[job] = Job(parent, "waiting", after=id)

    @rule(which=PICK, number=st.integers(1, 3), beside=st.booleans())
    def add(self, which: int, number: int, beside: bool) -> None:
        """Add children, in a transaction of its own or in the one that stays open."""
        group = self.group_at(which)
        if group is None:
            return
        if not self.groups[group].takes_children:
            with pytest.raises(psycopg.Error, match="takes no more children"):
                self.call("select penstock.enqueue('step', p_group => %s)", group)
            return
        ids = [uuid.uuid4() for _ in range(number)]
        connection = self.other if beside else self.connection
        connection.execute(
            "select penstock.enqueue('step', p_id => given.id, p_group => %s) from unnest(%s) as given (id)", (group, ids)
        )
        if beside:
            self.uncommitted |= {id: Job(group) for id in ids}
            self.groups[group].adding += number
        else:
            self.jobs |= {id: Job(group) for id in ids}

    @rule(commit=st.booleans())
    def end_transaction(self, commit: bool) -> None:
        if commit:
            self.other.commit()
            self.jobs |= self.uncommitted
        else:
            self.other.rollback()
        self.uncommitted = {}
        for group in self.groups.values():
            group.adding = 0

    @rule(which=PICK)
    def seal(self, which: int) -> None:
        if (group := self.group_at(which)) is not None:
            self.call("select penstock.seal_group(%s)", group)
            self.groups[group].sealed = True

    @rule(which=PICK)
    def cancel(self, which: int) -> None:
        if (id := self.group_at(which)) is None:
            return
        self.call("select penstock.cancel_group(%s)", id)
        group = self.groups[id]
        if group.takes_children:
            self.stop(id)
            if group.then is not None and self.jobs[group.then].status == "waiting":
                self.jobs[group.then].status = "cancelled"

    @rule(limit=st.integers(1, 4))
    def claim(self, limit: int) -> None:
        self.do_what_follows()
        for id, attempt, lease in self.call("select id, attempt, lease from penstock.claim('w', '{step}', %s)", limit):
            assert self.jobs[id].status == "queued"
            self.jobs[id].status = "in-progress"
            self.held[id] = attempt, lease

    @rule(which=PICK, outcome=st.sampled_from(["succeeded"] * 5 + ["failed", "cancelled"]))
    def settle(self, which: int, outcome: str) -> None:
        if not self.held:
            return
        id = list(self.held)[which % len(self.held)]
        attempt, lease = self.held.pop(id)
        self.call(
            "select * from penstock.settle(array[%s::uuid], array[%s::smallint], array[%s::bigint], array[%s])",
            id, attempt, lease, outcome,
        )  # fmt: skip
        # A job that is to be cancelled is not retried, and has not failed.
        self.jobs[id].status = "cancelled" if self.jobs[id].cancelling and outcome == "failed" else outcome

    @rule()
    def do_what_follows(self) -> None:
        """Resolve, and advance the operations that cancel children, until nothing is left; then compare."""
        again = True
        while again:
            again = False
            while self.call("select penstock.resolve_workflows()") != [(0,)]:
                again = True
            while self.call("select id from penstock.advance_operation()") != [(None,)]:
                again = True
        self.follow()
        rows = self.call(
            "select id, 'waiting' from penstock.waiting_jobs union all select id, status::text from penstock.queued_jobs"
            " union all select id, status::text from penstock.archived_jobs"
        )
        assert dict(rows) == {id: job.status for id, job in self.jobs.items()}
        seen = {
            row[0]: row[1:]
            for row in self.call("select id, status, added, succeeded, failed, cancelled from penstock.group_list(1000)")
        }
        for id, group in self.groups.items():
            ends = Counter(self.children(id))
            status = group.status or ("running" if group.sealed else "open")
            assert seen[id] == (status, ends.total(), ends["succeeded"], ends["failed"], ends["cancelled"]), (id, group)
        if not self.uncommitted:
            assert self.call("select count(*) from penstock.workflow_ticks") == [(0,)]

    def children(self, id: uuid.UUID) -> list[str | None]:
        """How the children of a group ended, or stand."""
        jobs: list[str | None] = [job.status for job in self.jobs.values() if job.group == id]
        return jobs + [group.status for group in self.groups.values() if group.parent == id]

    def stop(self, id: uuid.UUID) -> None:
        """The group and those in it take no more children, and their children are cancelled."""
        group = self.groups[id]
        if group.status is None:
            group.sealed = group.cancelled = True
        for inner, part in self.groups.items():
            if part.parent == id:
                self.stop(inner)

    def follow(self) -> None:
        """What follows from the ends so far, in the model."""
        changed = True
        while changed:
            before = repr((self.jobs, self.groups))
            for job in self.jobs.values():
                if job.group is not None and self.groups[job.group].cancelled:
                    job.cancelling |= job.status == "in-progress"
                    job.status = "cancelled" if job.status in ("queued", "waiting") else job.status
            for id, group in self.groups.items():
                children = self.children(id)
                if group.takes_children and group.on_failure == "cancel" and "failed" in children:
                    self.stop(id)
                if group.status is None and group.sealed and not group.adding and all(child in ENDED for child in children):
                    failed, stopped = "failed" in children, "cancelled" in children or group.cancelled
                    group.status = "failed" if failed else "cancelled" if stopped else "succeeded"
                    if group.then is not None and self.jobs[group.then].status == "waiting":
                        runs = group.status == "succeeded" or group.on_failure == "continue"
                        self.jobs[group.then].status = "queued" if runs else "cancelled"
            changed = before != repr((self.jobs, self.groups))

    def teardown(self) -> None:
        """Everything runs to its end, and no group is left."""
        if not hasattr(self, "jobs"):
            return
        self.end_transaction(True)
        for group in self.groups:
            self.call("select penstock.seal_group(%s)", group)
            self.groups[group].sealed = True
        self.claim(100)
        while self.held:
            while self.held:
                self.settle(0, "succeeded")
            self.claim(100)
        self.do_what_follows()
        assert all(job.status in ENDED for job in self.jobs.values()), self.jobs
        assert all(group.status is not None for group in self.groups.values()), self.groups


@pytest.fixture
def connections(databases: TemporaryDatabases) -> Iterator[tuple[psycopg.Connection[Any], psycopg.Connection[Any]]]:
    with (
        databases.database() as url,
        psycopg.connect(url, autocommit=True, options="-c lock_timeout=20s") as connection,
        psycopg.connect(url, options="-c lock_timeout=20s") as other,
    ):
        yield connection, other


@pytest.mark.timeout(400)  # As many calls as chance gives.
@pytest.mark.parametrize("examples", [25, pytest.param(200, marks=pytest.mark.soak)])
def test_groups_do_what_the_model_says(
    connections: tuple[psycopg.Connection[Any], psycopg.Connection[Any]], examples: int
) -> None:
    Groups.connection, Groups.other = connections
    run_state_machine_as_test(
        Groups,
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)),
    )
