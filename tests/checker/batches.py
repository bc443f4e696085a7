"""The promise of batch handlers: every job of a batch has an outcome of its own, whatever becomes of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Begun:
    """An attempt that a batch handler began."""

    job: str
    attempt: int


@dataclass(frozen=True)
class Settled:
    """A job in the archive: its status, its last attempt, its result, and its errors as (attempt, type, message)."""

    id: str
    status: str
    attempt: int
    result: Any
    errors: tuple[tuple[int, str, str], ...] = ()


def check_batches(enqueued: Mapping[str, Mapping[str, Any]], begun: Sequence[Begun], settled: Sequence[Settled]) -> list[str]:
    """The violations of a run.

    Args:
        enqueued: The payload of each job: its number `n`, and what it `does` (None, `kill`, `fail` or `final`).
        begun: The attempts that handlers began.
        settled: The archive.
    """
    violations = []
    archived: dict[str, list[Settled]] = {}
    for each in settled:
        archived.setdefault(each.id, []).append(each)
    attempts: dict[str, list[int]] = {}
    for begin in begun:
        attempts.setdefault(begin.job, []).append(begin.attempt)
    for id, payload in enqueued.items():
        rows = archived.get(id, [])
        if len(rows) == 1:
            violations += _of_one(rows[0], payload, attempts.get(id, []))
        else:
            violations.append(f"P2: job {id} is archived {len(rows)} times")
    violations += [f"P2: job {id}, which is archived, was not enqueued" for id in archived.keys() - enqueued.keys()]
    return violations


def _of_one(row: Settled, payload: Mapping[str, Any], begun: Sequence[int]) -> list[str]:
    violations = []
    number, does = payload["n"], payload["does"]
    twice = sorted(attempt for attempt, times in Counter(begun).items() if times > 1)
    if twice:
        violations.append(f"P4: attempts {twice} of job {row.id} began twice")
    if row.attempt != max(begun, default=0):
        violations.append(f"P4: job {row.id} ended with attempt {row.attempt}; these began: {sorted(begun)}")
    wanted = "failed" if does == "final" else "succeeded"
    if row.status != wanted:
        violations.append(f"P2: job {row.id}, which is to have {wanted}, {row.status} with {row.errors}")
    elif wanted == "succeeded" and row.result != {"n": number, "attempt": row.attempt}:
        violations.append(f"P2: job {row.id}, number {number}, attempt {row.attempt}, has the result {row.result}")
    # A process that dies leaves errors too, which are no outcomes of the handler.
    own = [error for error in row.errors if error[1] in ("ValueError", "Fail")]
    kind = {"fail": "ValueError", "final": "Fail"}.get(str(does))
    strange = [error for error in own if error[1:] != (kind, f"job {number}") or error[0] not in begun]
    if strange or len(own) > 1 or (does == "final" and not own):
        violations.append(f"P2: job {row.id}, number {number}, which is to {does or 'succeed'}, has the errors {row.errors}")
    return violations
