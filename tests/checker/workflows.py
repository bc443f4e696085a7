"""The promises of workflows: a waiting job always ends (P13), and runs after the jobs for which it waits, once (P14)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Planned:
    """A job whose enqueue was acknowledged: for which jobs it waits, and whether any end of theirs will do."""

    id: str
    after: tuple[str, ...] = ()
    at_any_end: bool = False


@dataclass(frozen=True)
class Group:
    """A job group at the end of a run: the children that were acknowledged, and the job that was to run when all had ended."""

    name: str
    children: tuple[str, ...]
    then: str
    finished: bool
    added: int
    ended: int


@dataclass(frozen=True)
class Step:
    """A step of a run at its end: how many jobs it was to have, those that it has, and the steps after which it was to run."""

    planned: int
    jobs: tuple[str, ...]
    after: tuple[str, ...] = ()
    at_any_end: bool = False


@dataclass(frozen=True)
class Run:
    """A run of a graph at the end of the chaos."""

    name: str
    finished: bool
    steps: Mapping[str, Step]

    def behind(self, name: str) -> tuple[str, ...]:
        """The jobs for which a step behind this one waits: without jobs of its own, those before it."""
        step = self.steps[name]
        return step.jobs if step.planned else tuple(job for before in step.after for job in self.behind(before))


@dataclass(frozen=True)
class Retry:
    """A run that retries another one: the steps that did not succeed there; and with `from_step` that one and all behind it."""

    name: str
    of: str
    from_step: str | None = None


@dataclass(frozen=True)
class Archived:
    """A job at the end of a run. Times are those of the database; `started_at` is that of its last attempt, None: it has none."""

    id: str
    status: str
    reason: str | None = None
    started_at: float | None = None
    finished_at: float = 0.0


@dataclass(frozen=True)
class Started:
    """An attempt that a handler saw begin."""

    id: str
    attempt: int


def check_workflows(
    planned: Iterable[Planned], archived: Sequence[Archived], started: Sequence[Started], waiting: Iterable[str] = ()
) -> list[str]:
    """The violations of a run that is over.

    Args:
        planned: What was acknowledged.
        archived: All rows of the archive.
        started: The attempts that handlers saw begin.
        waiting: The ids of the jobs that are not finished.
    """
    jobs = {job.id: job for job in planned}
    rows: dict[str, list[Archived]] = defaultdict(list)
    for row in archived:
        rows[row.id].append(row)
    violations = [f"P13: job {id} still waits after the run" for id in sorted(waiting)]
    for id, of_job in rows.items():
        if len(of_job) > 1:
            violations.append(f"P14: job {id} ended {len(of_job)} times")
    violations += [f"P1: job {id} is nowhere" for id in jobs if id not in rows and id not in set(waiting)]
    ends = {id: of_job[0] for id, of_job in rows.items()}
    for (id, attempt), times in Counter((each.id, each.attempt) for each in started).items():
        if times > 1:
            violations.append(f"P14: attempt {attempt} of job {id} started {times} times")
    began = {each.id for each in started}
    for job in jobs.values():
        if (end := ends.get(job.id)) is not None:
            violations += _of_dependent(job, end, ends, began)
    return violations


def check_groups(groups: Iterable[Group], archived: Sequence[Archived], started: Iterable[Started]) -> list[str]:
    """The violations of job groups that go on when children fail: `then` runs once, after the last child has ended."""
    ends = {row.id: row for row in archived}
    first = Counter(each.id for each in started if each.attempt == 1)
    violations = []
    for group in groups:
        then = ends.get(group.then)
        if not group.finished:
            violations.append(f"P13: job group {group.name} has not ended: {group.ended} of {group.added} children")
        if group.added != len(group.children):
            violations.append(f"P14: job group {group.name} counts {group.added} children and has {len(group.children)}")
        if then is None or then.status != "succeeded":
            violations.append(f"P13: the then of job group {group.name} did not run")
        if first[group.then] > 1:
            violations.append(f"P14: the then of job group {group.name} started {first[group.then]} times")
        for child in group.children:
            if (end := ends.get(child)) is None:
                violations.append(f"P1: child {child} of job group {group.name} is nowhere")
            elif then is not None and then.started_at is not None and then.started_at < end.finished_at:
                violations.append(f"P14: the then of job group {group.name} ran before child {child} had ended")
    return violations


def check_runs(
    starts: Mapping[str, int], runs: Iterable[Run], archived: Sequence[Archived], started: Iterable[Started]
) -> list[str]:
    """The violations of runs of graphs: each is there once, however often it was started, and ends with each of its steps.

    Args:
        starts: How often the start of each run was acknowledged, by its name.
        runs: The runs at the end, with the jobs of each step.
        archived: All rows of the archive.
        started: The attempts that handlers saw begin.
    """
    runs = list(runs)
    number = Counter(run.name.partition("/")[0] for run in runs)
    violations = [f"P14: run {name} is there {number[name]} times" for name in starts if number[name] != 1]
    planned = []
    for run in runs:
        if not run.finished:
            violations.append(f"P13: run {run.name} has not ended")
        for name, step in run.steps.items():
            if len(step.jobs) != step.planned:
                violations.append(f"P14: step {name} of run {run.name} has {len(step.jobs)} jobs, and not {step.planned}")
            after = tuple(job for before in step.after for job in run.behind(before))
            planned += [Planned(job, after, step.at_any_end) for job in step.jobs]
    return violations + check_workflows(planned, archived, list(started))


def check_retries(
    retries: Iterable[Retry], runs: Iterable[Run], archived: Sequence[Archived], started: Sequence[Started]
) -> list[str]:
    """The violations of retries of runs: each is there once, runs again what it is to, and shares the rest.

    Args:
        retries: What was acknowledged. A retry can be of a retry.
        runs: All runs at the end; of each step the jobs that it has, and as `planned` how many the first run was to have.
        archived: All rows of the archive.
        started: The attempts that handlers saw begin.
    """
    runs = list(runs)
    ends = {row.id: row.status for row in archived}
    by_name, number = {run.name: run for run in runs}, Counter(run.name for run in runs)
    planned: list[Planned] = []
    violations = []
    for retry in retries:
        if (run := by_name.get(retry.name)) is None or number[retry.name] > 1:
            violations.append(f"P14: run {retry.name}, a retry of {retry.of}, is there {number[retry.name]} times")
            continue
        if not run.finished:
            violations.append(f"P13: run {run.name} has not ended")
        before = by_name[retry.of].steps
        behind: set[str] = set()
        steps: dict[str, Step] = {}
        for name, step in run.steps.items():
            if name == retry.from_step or behind & set(step.after):
                behind.add(name)
        for name, step in run.steps.items():
            unsuccessful = [job for job in before[name].jobs if ends.get(job) != "succeeded"]
            what = f"P14: step {name} of run {run.name}"
            same = set(step.jobs) & set(before[name].jobs)
            expected = len(before[name].jobs)
            if name in behind or unsuccessful:
                expected = len(unsuccessful) if retry.from_step is None else step.planned
                if same:
                    why = "is behind the step from which it is retried" if name in behind else "did not succeed"
                    violations.append(f"{what} {why}, and is not run again")
            elif len(same) < len(step.jobs):
                violations.append(f"{what} succeeded before, and is run again")
            if len(step.jobs) != expected:
                violations.append(f"{what} has {len(step.jobs)} jobs, and not {expected}")
            steps[name] = Step(expected, step.jobs, step.after, step.at_any_end)
        now = Run(run.name, run.finished, steps)
        for name, step in steps.items():
            if not set(step.jobs) & set(before[name].jobs):
                after = tuple(job for other in step.after for job in now.behind(other))
                planned += [Planned(job, after, step.at_any_end) for job in step.jobs]
    return violations + check_workflows(planned, archived, started)


def _of_dependent(job: Planned, end: Archived, ends: Mapping[str, Archived], began: set[str]) -> list[str]:
    violations = []
    unmet = [other for other in job.after if not job.at_any_end and (there := ends.get(other)) and there.status != "succeeded"]
    if end.reason == "dependency":
        if not unmet:
            violations.append(f"P13: job {job.id} was cancelled although each job for which it waited ended as it was to")
        if job.id in began:
            violations.append(f"P13: job {job.id} started and was cancelled because of a dependency")
    elif job.id in began or end.started_at is not None:
        violations += [
            f"P13: job {job.id} ran although job {other}, which {ends[other].status}, was to succeed" for other in unmet
        ]
    for other in job.after:
        if (before := ends.get(other)) is None:
            if job.id in began:
                violations.append(f"P13: job {job.id} ran before job {other} had ended")
        elif end.started_at is not None and end.started_at < before.finished_at:
            violations.append(f"P13: job {job.id} ran {before.finished_at - end.started_at:.3f} s before job {other} ended")
    return violations


@dataclass(frozen=True)
class NestedGroup:
    """A job group at the end of a run in which groups lie in groups and are cancelled.

    `children` are the jobs that were acknowledged; `maybe` those whose enqueue was refused after one whose answer was lost.
    `stopped`: whether it was cancelled, by a call or since a child failed. `ends` are the numbers of the record, by status.
    """

    name: str
    children: tuple[str, ...]
    inner: tuple[str, ...]
    then: str
    on_failure: str
    status: str | None
    finished_at: float
    added: int
    ends: Mapping[str, int]
    maybe: tuple[str, ...] = ()
    stopped: bool = False


def check_nested(groups: Sequence[NestedGroup], archived: Sequence[Archived], started: Iterable[Started]) -> list[str]:
    """The violations of job groups in job groups: each ends, after all in it, with the numbers of its children, and `then` runs
    at most once, after them, and only when the group ended as it was to."""
    rows = Counter(row.id for row in archived)
    ends = {row.id: row for row in archived}
    by_name = {group.name: group for group in groups}
    began, first = set[str](), Counter[str]()
    for each in started:
        began.add(each.id)
        first[each.id] += each.attempt == 1
    violations = [f"P14: job {id} ended {times} times" for id, times in rows.items() if times > 1]
    for group in groups:
        if group.status is None:
            violations.append(f"P13: job group {group.name} has not ended: {sum(group.ends.values())} of {group.added} children")
            continue
        inner = [by_name[name] for name in group.inner]
        jobs = [*group.children, *(each.then for each in inner)]
        violations += [f"P1: child {id} of job group {group.name} is nowhere" for id in jobs if id not in ends]
        known = [ends[id] for id in (*jobs, *group.maybe) if id in ends]
        counted = Counter([row.status for row in known] + [str(each.status) for each in inner])
        if (group.added, {status: n for status, n in group.ends.items() if n}) != (counted.total(), dict(counted)):
            violations.append(f"P14: job group {group.name} counts {dict(group.ends)} of {group.added}, and has {dict(counted)}")
        if late := [row.id for row in known if row.finished_at > group.finished_at] + [
            each.name for each in inner if each.finished_at > group.finished_at
        ]:
            violations.append(f"P14: job group {group.name} ended before {late[0]} in it")
        expected = "failed" if counted["failed"] else "cancelled" if counted["cancelled"] or group.stopped else "succeeded"
        if group.status != expected:
            violations.append(f"P14: job group {group.name} {group.status} with {dict(counted)}")
        inside = any(each.stopped and group.name in each.inner for each in groups)
        violations += _of_then(group, ends.get(group.then), group.then in began, first[group.then], inside or group.stopped)
    return violations


def _of_then(group: NestedGroup, then: Archived | None, began: bool, first: int, stopped: bool) -> list[str]:
    name = f"the then of job group {group.name}"
    if then is None:
        return [f"P13: {name} has not ended"]
    violations = [f"P14: {name} started {first} times"] if first > 1 else []
    runs = group.status == "succeeded" or group.on_failure == "continue"
    if began and not runs:
        violations.append(f"P14: {name} started although the group {group.status}")
    if began and then.started_at is not None and then.started_at < group.finished_at:
        violations.append(f"P14: {name} started before the group had ended")
    if runs and not stopped and then.status != "succeeded":
        violations.append(f"P13: {name} did not run: {then.status}, {then.reason}")
    if not began and then.status == "succeeded":
        violations.append(f"P14: {name} succeeded without a start")
    return violations
