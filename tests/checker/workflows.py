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
    """A job group at the end of a run: the children that were acknowledged, and the job that was to run when all had ended.

    `ends` are the numbers of its record, by status, `status` how it ended, `finished_at` when; None: they are not known.
    """

    name: str
    children: tuple[str, ...]
    then: str
    finished: bool
    added: int
    ended: int
    ends: Mapping[str, int] | None = None
    status: str | None = None
    finished_at: float | None = None


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
    """A job at the end of a run. Times are those of the database; `started_at` is that of its last attempt, None: it has none.

    `earlier` are the starts of the attempts that failed before, `attempt` is the number of the last one; None: it is not known.
    """

    id: str
    status: str
    reason: str | None = None
    started_at: float | None = None
    finished_at: float = 0.0
    expires_at: float | None = None
    earlier: tuple[float, ...] = ()
    attempt: int | None = None


@dataclass(frozen=True)
class Started:
    """An attempt that a handler saw begin."""

    id: str
    attempt: int


def check_workflows(
    planned: Iterable[Planned],
    archived: Sequence[Archived],
    started: Sequence[Started],
    waiting: Iterable[str] = (),
    cancelled: Iterable[str] = (),
) -> list[str]:
    """The violations of a run that is over.

    Args:
        planned: What was acknowledged.
        archived: All rows of the archive.
        started: The attempts that handlers saw begin, in this order.
        waiting: The ids of the jobs that are not finished.
        cancelled: The ids of the jobs whose cancellation was asked for.
    """
    jobs, left, asked = {job.id: job for job in planned}, set(waiting), set(cancelled)
    rows: dict[str, list[Archived]] = defaultdict(list)
    for row in archived:
        rows[row.id].append(row)
    violations = [f"P13: job {id} still waits after the run" for id in sorted(left)]
    for id, of_job in rows.items():
        if len(of_job) > 1:
            violations.append(f"P14: job {id} ended {len(of_job)} times")
        if id in left:
            violations.append(f"P14: job {id} has ended and still waits")
    violations += [f"P1: job {id} is nowhere" for id in jobs if id not in rows and id not in left]
    ends = {id: of_job[0] for id, of_job in rows.items()}
    for (id, attempt), times in Counter((each.id, each.attempt) for each in started).items():
        if times > 1:
            violations.append(f"P14: attempt {attempt} of job {id} started {times} times")
    starts = _Starts(started)
    for job in jobs.values():
        if (end := ends.get(job.id)) is not None:
            violations += _of_end(f"job {job.id}", end, starts, job.id in asked)
            violations += _of_dependent(job, end, ends, starts)
    return violations


def check_groups(
    groups: Iterable[Group], archived: Sequence[Archived], started: Iterable[Started], cancelled: Iterable[str] = ()
) -> list[str]:
    """The violations of job groups that go on when children fail: `then` runs once, after the last child has ended.

    Args:
        groups: The groups that were opened.
        archived: All rows of the archive.
        started: The attempts that handlers saw begin, in this order.
        cancelled: The ids of the jobs whose cancellation was asked for.
    """
    rows, ends = Counter(row.id for row in archived), {row.id: row for row in archived}
    starts, asked = _Starts(started), set(cancelled)
    violations = []
    for group in groups:
        of_group, then = f"job group {group.name}", ends.get(group.then)
        children = dict.fromkeys(group.children)
        if not group.finished:
            violations.append(f"P13: {of_group} has not ended: {group.ended} of {group.added} children")
        elif group.ended != group.added:
            violations.append(f"P14: {of_group} ended with {group.ended} of {group.added} children")
        if group.added != len(children):
            violations.append(f"P14: {of_group} counts {group.added} children and has {len(children)}")
        if then is None or then.status != "succeeded":
            violations.append(f"P13: the then of {of_group} did not run")
        if starts.number(group.then, 1) > 1:
            violations.append(f"P14: the then of {of_group} started {starts.number(group.then, 1)} times")
        if then is not None:
            violations += _of_end(f"the then of {of_group}", then, starts, asked=False)
            if group.finished_at is not None and (begun := _first(then)) is not None and begun < group.finished_at:
                violations.append(f"P14: the then of {of_group} started before the group had ended")
        violations += [
            f"P14: {what} of {of_group} ended {rows[id]} times"
            for what, id in [("the then", group.then), *((f"child {child}", child) for child in children)]
            if rows[id] > 1
        ]
        for child in children:
            if (end := ends.get(child)) is None:
                violations.append(f"P1: child {child} of {of_group} is nowhere")
                continue
            violations += _of_end(f"child {child} of {of_group}", end, starts, child in asked)
            if group.finished_at is not None and end.finished_at > group.finished_at:
                violations.append(f"P14: {of_group} ended before child {child} of it")
            early = then is not None and (begun := _first(then)) is not None and begun < end.finished_at
            if early or starts.before(group.then, end):
                violations.append(f"P14: the then of {of_group} ran before child {child} had ended")
        counted = Counter(ends[child].status for child in children if child in ends)
        if group.ends is not None and {status: n for status, n in group.ends.items() if n} != dict(counted):
            violations.append(f"P14: {of_group} counts {dict(group.ends)}, and has {dict(counted)}")
        ended_as = next((status for status in ("failed", "cancelled", "expired") if counted[status]), "succeeded")
        if group.status is not None and group.status != ended_as:
            violations.append(f"P14: {of_group} {group.status} with {dict(counted)}")
    return violations


class _Starts:
    """The attempts that handlers saw begin, in their order."""

    def __init__(self, started: Iterable[Started]) -> None:
        self._places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for place, each in enumerate(started):
            self._places[each.id].append((place, each.attempt))

    def __contains__(self, id: str) -> bool:
        return id in self._places

    def number(self, id: str, attempt: int) -> int:
        """How often this attempt of a job began."""
        return sum(each == attempt for _, each in self._places.get(id, ()))

    def before(self, id: str, end: Archived) -> bool:
        """Whether an attempt of a job began before that with which another job ended.

        A worker that counts as dead may begin an attempt of a job that has ended: the other attempts say nothing.
        """
        of_end = [place for place, attempt in self._places.get(end.id, ()) if end.attempt in (None, attempt)]
        of_job = self._places.get(id)
        return bool(of_end and of_job and of_job[0][0] < min(of_end))


def _first(end: Archived) -> float | None:
    """When the first attempt of a job began, as far as its row says."""
    return min((*end.earlier, *([] if end.started_at is None else [end.started_at])), default=None)


def _of_end(what: str, end: Archived, starts: _Starts, asked: bool) -> list[str]:
    """Whether a job may have ended as it did."""
    violations = []
    if end.status == "cancelled" and end.reason != "dependency" and not asked:
        violations.append(f"P2: {what} was cancelled by nobody")
    if end.status == "expired" and end.expires_at is None:
        violations.append(f"P2: {what} expired and had no time at which it expires")
    elif end.status == "expired" and end.expires_at is not None and end.finished_at < end.expires_at:
        violations.append(f"P2: {what} expired before its time")
    # What cannot be read never starts.
    unread = end.status == "failed" and end.reason == "quarantined"
    if end.status in ("succeeded", "failed") and not unread and (end.started_at is None or end.id not in starts):
        violations.append(f"P2: {what} {end.status} without a start")
    if end.started_at is not None and end.finished_at < end.started_at:
        violations.append(f"P2: {what} ended before it started")
    return violations


def check_runs(
    starts: Mapping[str, int],
    runs: Iterable[Run],
    archived: Sequence[Archived],
    started: Iterable[Started],
    cancelled: Iterable[str] = (),
) -> list[str]:
    """The violations of runs of graphs: each is there once, however often it was started, and ends with each of its steps.

    Args:
        starts: How often the start of each run was acknowledged, by its name.
        runs: The runs at the end, with the jobs of each step.
        archived: All rows of the archive.
        started: The attempts that handlers saw begin, in this order.
        cancelled: The ids of the jobs whose cancellation was asked for.
    """
    runs = list(runs)
    number = Counter(run.name.partition("/")[0] for run in runs)
    violations = [f"P14: run {name} is there {number[name]} times" for name in starts if number[name] != 1]
    planned = []
    for run in runs:
        if not run.finished:
            violations.append(f"P13: run {run.name} has not ended")
        for id, times in Counter(job for step in run.steps.values() for job in step.jobs).items():
            if times > 1:
                violations.append(f"P14: job {id} stands in {times} places of run {run.name}")
        for name, step in run.steps.items():
            if len(step.jobs) != step.planned:
                violations.append(f"P14: step {name} of run {run.name} has {len(step.jobs)} jobs, and not {step.planned}")
            after = tuple(job for before in step.after for job in run.behind(before))
            planned += [Planned(job, after, step.at_any_end) for job in step.jobs]
    return violations + check_workflows(planned, archived, list(started), cancelled=cancelled)


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


def _of_dependent(job: Planned, end: Archived, ends: Mapping[str, Archived], starts: _Starts) -> list[str]:
    violations = []
    unmet = [other for other in job.after if not job.at_any_end and (there := ends.get(other)) and there.status != "succeeded"]
    ran = job.id in starts or _first(end) is not None
    if end.reason == "dependency":
        if end.status != "cancelled":
            violations.append(f"P13: job {job.id} {end.status} because of a dependency")
        if not unmet:
            violations.append(f"P13: job {job.id} was cancelled although each job for which it waited ended as it was to")
        elif end.finished_at < min(ends[other].finished_at for other in unmet):
            violations.append(f"P13: job {job.id} was cancelled before a job for which it waited had ended")
        if ran:
            violations.append(f"P13: job {job.id} started and was cancelled because of a dependency")
    elif ran:
        violations += [
            f"P13: job {job.id} ran although job {other}, which {ends[other].status}, was to succeed" for other in unmet
        ]
    first = _first(end)
    for other in job.after:
        if (before := ends.get(other)) is None:
            if ran:
                violations.append(f"P13: job {job.id} ran before job {other} had ended")
        elif first is not None and first < before.finished_at:
            violations.append(f"P13: job {job.id} ran {before.finished_at - first:.3f} s before job {other} ended")
        elif starts.before(job.id, before):
            violations.append(f"P13: an attempt of job {job.id} began before job {other} had ended")
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
