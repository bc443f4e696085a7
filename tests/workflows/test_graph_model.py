"""Random graphs against a simple model: which steps run, how each ends, and what a retry runs again.

Hypothesis prints how to repeat a failure.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.testing import TemporaryDatabases

Sql = psycopg.Connection[Any]
OUTCOMES = st.sampled_from(["succeeded", "succeeded", "succeeded", "failed", "cancelled"])


@dataclass(frozen=True)
class Planned:
    """A step as it is drawn: one job, or many; what becomes of each job at the first start and at each retry."""

    name: str
    after: tuple[int, ...]
    at_any_end: bool
    jobs: int | None
    outcomes: tuple[tuple[str, ...], ...]

    def document(self, names: list[str]) -> dict[str, Any]:
        data = [{"data": {"step": self.name, "n": n}} for n in range(1 if self.jobs is None else self.jobs)]
        own: dict[str, Any] = data[0] if self.jobs is None else {"jobs": data}
        when = {"when": "finished"} if self.at_any_end else {}
        return {
            "name": self.name,
            "type": f"type-{len(self.name) % 2}",
            "after": [names[place] for place in self.after],
            **when,
            **own,
        }


@st.composite
def graphs(draw: st.DrawFn) -> list[Planned]:
    steps: list[Planned] = []
    for place in range(draw(st.integers(1, 9))):
        jobs = draw(st.sampled_from([None, None, None, 0, 1, 3]))
        after = tuple(sorted(draw(st.sets(st.integers(0, place - 1), max_size=3)))) if place else ()
        number = 1 if jobs is None else jobs
        outcomes = tuple(tuple(draw(OUTCOMES) for _ in range(number)) for _ in range(3))
        # Names of two lengths, so that there are steps of two types.
        steps.append(
            Planned(f"s{place}" + "x" * draw(st.integers(0, 1)), after, draw(st.booleans()) and bool(after), jobs, outcomes)
        )
    return steps


class Model:
    """How the jobs of each step ended so far, by name and number; None: not yet."""

    def __init__(self, steps: list[Planned]) -> None:
        self.steps = steps
        self.ends: dict[str, list[str | None]] = {step.name: [None] * (1 if step.jobs is None else step.jobs) for step in steps}

    def status(self, step: Planned) -> str:
        ends = self.ends[step.name]
        return next((each for each in ("failed", "cancelled") if each in ends), "succeeded")

    def effective(self, place: int) -> set[int]:
        """What those behind a step wait for: a step without jobs is nothing to wait for."""
        if self.steps[place].jobs != 0:
            return {place}
        return {other for before in self.steps[place].after for other in self.effective(before)}

    def run(self, number: int, again: set[int]) -> Counter[tuple[str, int]]:
        """Run these steps, of which the jobs that succeeded stay as they are. Returns the jobs that start."""
        started: Counter[tuple[str, int]] = Counter()
        for place in sorted(again):
            step = self.steps[place]
            left = [n for n, end in enumerate(self.ends[step.name]) if end != "succeeded"]
            waits = {other for before in step.after for other in self.effective(before)} & again
            met = step.at_any_end or all(self.status(self.steps[other]) == "succeeded" for other in waits)
            for n in left:
                self.ends[step.name][n] = step.outcomes[number][n] if met else "cancelled"
                if met:
                    started[step.name, n] += 1
        return started


def drive(sql: Sql, steps: list[Planned], number: int, chunk: int) -> Counter[tuple[str, int]]:
    """Claim and settle, a few jobs at a time, until nothing is left. Returns the jobs that started."""
    started: Counter[tuple[str, int]] = Counter()
    by_name = {step.name: step for step in steps}
    while True:
        while sql.execute("select penstock.resolve_workflows()").fetchone() != (0,):
            pass
        rows = sql.execute(
            "select id, attempt, lease, data::text from penstock.claim('w', '{type-0,type-1}', %s)", (chunk,)
        ).fetchall()
        if not rows:
            return started
        outcomes = []
        for row in rows:
            job = json.loads(row[3])
            started[job["step"], job["n"]] += 1
            outcomes.append(by_name[job["step"]].outcomes[number][job["n"]])
        sql.execute(
            "select * from penstock.settle(%s, %s::smallint[], %s::bigint[], %s)",
            ([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], outcomes),
        )


@pytest.fixture
def sql(databases: TemporaryDatabases) -> Iterator[Sql]:
    with databases.database() as url, psycopg.connect(url, autocommit=True) as connection:
        for name in ("type-0", "type-1"):
            connection.execute("select penstock.create_job_type(%s, '{\"max_attempts\": 1}')", (name,))
        yield connection


@pytest.mark.timeout(400)  # As many graphs as chance gives.
def test_random_graphs_do_what_the_model_says(sql: Sql) -> None:
    @settings(max_examples=25, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(steps=graphs(), chunk=st.integers(1, 4), chosen=st.integers(0, 8))
    def check(steps: list[Planned], chunk: int, chosen: int) -> None:
        sql.execute("truncate penstock.job_groups, penstock.graph_steps, penstock.workflow_ticks, penstock.archived_jobs")
        names = [step.name for step in steps]
        documents = json.dumps([step.document(names) for step in steps])
        start = "select penstock.start_workflow('model', 'run', %s::jsonb)"
        ((run,),) = sql.execute(start, (documents,)).fetchall()
        assert sql.execute(start, (documents,)).fetchall() == [(run,)]
        model = Model(steps)
        again = set(range(len(steps)))
        for number in range(3):
            expected = model.run(number, again)
            assert drive(sql, steps, number, chunk) == expected
            found = sql.execute("select name, status from penstock.workflow_steps(%s)", (run,)).fetchall()
            assert found == [(step.name, model.status(step)) for step in steps]
            ((status, finished),) = sql.execute(
                "select status, finished_at is not null from penstock.job_groups where id = %s", (run,)
            )
            # What is shared succeeded; a run is what its own steps are.
            ends = [model.status(steps[place]) for place in again]
            assert (status, finished) == (next((each for each in ("failed", "cancelled") if each in ends), "succeeded"), True)
            again = {place for place, step in enumerate(steps) if model.status(step) != "succeeded"}
            if not again:
                break
            if number < 2:
                ((run,),) = sql.execute("select penstock.retry_workflow(%s)", (run,)).fetchall()
        # From a step on: it and all behind it, with all of their jobs.
        chosen %= len(steps)
        behind = {chosen}
        for place, step in enumerate(steps):
            if behind & set(step.after):
                behind.add(place)
        ((run,),) = sql.execute("select penstock.retry_workflow(%s, %s)", (run, names[chosen])).fetchall()
        again |= behind
        for place in again:
            model.ends[names[place]] = [None] * len(model.ends[names[place]])
        expected = model.run(2, again)
        assert drive(sql, steps, 2, chunk) == expected
        assert sql.execute("select count(*) from penstock.waiting_jobs").fetchone() == (0,)
        assert sql.execute("select count(*) from penstock.job_dependencies").fetchone() == (0,)

    check()
