"""The promise of `Job.finish`: the effects of a job and its place in the archive agree, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """A job at the end of a run: its status, and the number of its last attempt."""

    id: str
    status: str
    attempt: int


@dataclass(frozen=True)
class Effect:
    """What an attempt wrote in the transaction that finished its job."""

    job: str
    attempt: int


def check_finishing(enqueued: Sequence[str], ended: Sequence[Ended], effects: Sequence[Effect]) -> list[str]:
    """The violations of a run: each job that succeeded has one effect, of its last attempt, and no other job has any."""
    violations: list[str] = []
    archived: dict[str, list[Ended]] = {}
    for each in ended:
        archived.setdefault(each.id, []).append(each)
    written: dict[str, list[Effect]] = {}
    for effect in effects:
        written.setdefault(effect.job, []).append(effect)
    for id in enqueued:
        rows, of_job = archived.get(id, []), written.get(id, [])
        if len(rows) != 1:
            violations.append(f"P2: job {id} is archived {len(rows)} times")
            continue
        (row,) = rows
        wanted = 1 if row.status == "succeeded" else 0
        if len(of_job) != wanted:
            violations.append(f"P4: job {id}, which {row.status}, has {len(of_job)} effects")
        elif wanted and of_job[0].attempt != row.attempt:
            violations.append(f"P4: job {id} was finished by attempt {of_job[0].attempt} while attempt {row.attempt} had it")
    violations += [f"P2: an effect of job {id}, which was not enqueued" for id in written.keys() - set(enqueued)]
    return violations
