"""The promises of durable steps.

A waiting job always ends (P13), a step whose result was acknowledged does not run again (P15), and a signal is received exactly
once by the wait that it is for (P16).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Noted:
    """What a run of a handler noted, in the order of the notes.

    Attributes:
        kind: began; did: the function of a step was called; kept: `Job.step` returned; received: `Job.wait_for` ended.
        job: Id of the job.
        run: The run, an id of its own.
        step: Name of the step, or of the signal.
        value: kept: the run whose result it is; received: what was signalled, None: the wait timed out.
    """

    kind: str
    job: str
    run: str
    step: str = ""
    value: str | None = None


@dataclass(frozen=True)
class Written:
    """A result as it was written: under which lease the run had the job that did it, and under which the job was held then."""

    job: str
    step: str
    done_under: int
    held_under: int | None


@dataclass(frozen=True)
class Sent:
    """A signal, and what its sender was told: whether it was the first; None: the answer was lost."""

    job: str
    value: str
    first: bool | None


def check_steps(
    noted: Sequence[Noted], written: Iterable[Written], sent: Iterable[Sent], ended: Mapping[str, str], left: Iterable[str] = ()
) -> list[str]:
    """The violations of a run that is over.

    Args:
        noted: What the runs noted, in order.
        written: The results, as they were written.
        sent: The signals.
        ended: How each job ended that has.
        left: What has not ended: jobs, and job groups.
    """
    violations = [f"P13: {each} has not ended" for each in sorted(left)]
    violations += _of_steps(noted)
    violations += [
        f"P15: step {each.step} of job {each.job} was kept by a run with the lease {each.done_under},"
        f" while it was held under {each.held_under}"
        for each in written
        if each.done_under != each.held_under
    ]
    return violations + _of_signals(noted, sent, ended)


def _of_steps(noted: Sequence[Noted]) -> list[str]:
    violations = []
    began: dict[str, int] = {}
    acknowledged: dict[tuple[str, str], tuple[int, str | None]] = {}
    for place, note in enumerate(noted):
        of = (note.job, note.step)
        if note.kind == "began":
            began[note.run] = place
        elif note.kind == "did" and of in acknowledged and began[note.run] > acknowledged[of][0]:
            violations.append(f"P15: step {note.step} of job {note.job} ran again, in a run that began after it was acknowledged")
        elif note.kind == "kept":
            first = acknowledged.setdefault(of, (place, note.value))
            if first[1] != note.value:
                violations.append(f"P15: step {note.step} of job {note.job} has two results")
    return violations


def _of_signals(noted: Sequence[Noted], sent: Iterable[Sent], ended: Mapping[str, str]) -> list[str]:
    received: dict[str, set[str | None]] = defaultdict(set)
    for note in noted:
        if note.kind == "received":
            received[note.job].add(note.value)
    signals: dict[str, list[Sent]] = defaultdict(list)
    for each in sent:
        signals[each.job].append(each)
    violations = []
    for job in sorted(received.keys() | signals.keys()):
        got, told = received[job], [each.value for each in signals[job] if each.first]
        if len(got) > 1:
            violations.append(f"P16: the wait of job {job} had {len(got)} outcomes")
        if len(told) > 1:
            violations.append(f"P16: {len(told)} signals to job {job} were the first")
        if None in got and told:
            violations.append(f"P16: the wait of job {job} timed out, and a signal was accepted")
        possible = told or [each.value for each in signals[job] if each.first is None]
        if not got <= {None, *possible}:
            violations.append(f"P16: job {job} received a signal that was refused, or not sent")
        if ended.get(job) == "succeeded" and not got:
            violations.append(f"P16: job {job} succeeded without the end of its wait")
    return violations
