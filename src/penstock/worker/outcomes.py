"""The settlement of an attempt whose handler raised, was stopped, or did not start."""

from __future__ import annotations

import traceback
from datetime import timedelta
from typing import Any

import orjson

from penstock.core.logs import get_logger
from penstock.core.serialization import plain_text
from penstock.core.user_code import is_final, message_of, verdict_of
from penstock.errors import Retry, Snooze
from penstock.jobs import claim_queries
from penstock.jobs.models import Outcome, Settlement
from penstock.jobs.steps import suspended_by
from penstock.jobs.worked import NotStarted, SettledElsewhere
from penstock.worker.process import UnreadablePayload
from penstock.worker.running import Running

log = get_logger("penstock.worker")
_LONGEST_TRACEBACK = 8_000


def released(running: Running) -> Settlement:
    """The settlement of a job that is released as if it had not been claimed."""
    return Settlement(
        running.claimed.id, running.claimed.attempt, running.lease, Outcome.RELEASED, None, None, running.claimed.name
    )


def stopped(running: Running) -> Settlement:
    """The settlement of an attempt that was stopped, or that must not start."""
    claimed = running.claimed
    if running.reason == "cancelled":
        return Settlement(claimed.id, claimed.attempt, running.lease, Outcome.CANCELLED, None, None, claimed.name)
    if not running.entered:
        return released(running)
    if running.reason == "time limit":
        detail = {"type": "TimeLimit", "message": "the handler ran longer than its time limit"}
        return _failed_with(running, detail)
    cause = "was declared dead" if running.reason == "lost" else "shut down"
    detail = {"type": "Interrupted", "message": f"the worker {cause} before the handler was done"}
    text = running.worked.sealed_error(claimed.id, detail)
    if running.reason == "lost":
        # As recovery does with the jobs of a dead worker: the attempt is used up, so that its number is not given twice.
        return _ended(running, Outcome.FAILED, text, timedelta(0))
    # A release with a detail counts as started; an at_most_once job then fails, since it may start only once.
    return Settlement(claimed.id, claimed.attempt, running.lease, Outcome.RELEASED, text, None, claimed.name)


def settlement_of(running: Running, error: BaseException) -> Settlement | None:
    """The settlement of an attempt whose handler raised an error; None: the job is settled elsewhere."""
    try:
        if isinstance(error, SettledElsewhere):
            return None
        if isinstance(error, NotStarted):
            return released(running)
        if isinstance(error, UnreadablePayload):
            return _quarantined(running, error)
        if running.reason is not None:
            return stopped(running)
        verdict = verdict_of(error)
        if isinstance(verdict, Snooze):
            return _ended(running, Outcome.SNOOZED, delay=verdict.duration)
        if (step := suspended_by(error)) is not None:
            return _ended(running, Outcome.SUSPENDED, orjson.dumps({"step": step}).decode())
        # Without a reason, the handler cancelled itself.
        return _failed(running, error)
    except BaseException as failure:
        claimed = running.claimed
        log.exception("job_failed_oddly", job_id=str(claimed.id), job_type=claimed.name, key=claimed.key, attempt=claimed.attempt)
        return _failed(running, failure)


def not_committed(running: Running) -> Settlement:
    """The settlement of an attempt whose handler called `finish` and returned, while its transaction was rolled back."""
    error = {"type": "NotCommitted", "message": "the transaction in which the handler called finish() was not committed"}
    return _failed_with(running, error)


def _failed_with(running: Running, error: dict[str, Any]) -> Settlement:
    """The settlement of an attempt that failed for a reason of Penstock's own, without an exception of the handler."""
    claimed = running.claimed
    text = running.worked.sealed_error(claimed.id, error)
    return _ended(running, Outcome.FAILED, text)


def finished(running: Running) -> Settlement:
    """The settlement of a job that its handler finished, which is written already."""
    claimed = running.claimed
    return Settlement(claimed.id, claimed.attempt, running.lease, Outcome.SUCCEEDED, None, None, claimed.name, True)


def _quarantined(running: Running, error: Exception) -> Settlement:
    """The settlement of a job whose payload no attempt can read."""
    claimed = running.claimed
    detail = running.worked.sealed_error(
        claimed.id, claim_queries.quarantined_error(f"its payload cannot be read: {message_of(error)}")
    )
    return _ended(running, Outcome.QUARANTINED, detail)


def _failed(running: Running, error: BaseException) -> Settlement:
    message = message_of(error)
    try:
        trace = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
    except Exception as failure:  # such as exception groups nested without end
        trace = f"(its traceback cannot be formatted: {type(failure).__name__})"
    detail = {
        "type": type(error).__qualname__,
        "message": message,
        "traceback": plain_text(trace),
    }
    verdict = verdict_of(error)
    outcome = Outcome.FAILED_FOR_GOOD if is_final(verdict) else Outcome.FAILED
    delay = verdict.after if isinstance(verdict, Retry) else None
    return _ended(running, outcome, running.worked.sealed_error(running.claimed.id, detail), delay)


def _ended(running: Running, outcome: Outcome, detail: str | None = None, delay: timedelta | None = None) -> Settlement:
    """The settlement of an attempt that did not succeed, with what the log shows of it."""
    claimed = running.claimed
    return Settlement(
        claimed.id,
        claimed.attempt,
        running.lease,
        outcome,
        detail,
        delay,
        claimed.name,
        key=claimed.key,
        trace_id=running.trace_id,
    )
