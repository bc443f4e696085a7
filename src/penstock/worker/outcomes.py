"""What an attempt comes to: the settlement of a job whose handler returned, raised, or was stopped."""

from __future__ import annotations

import traceback
from datetime import timedelta

import orjson

from penstock.core.logs import get_logger
from penstock.core.serialization import plain_text
from penstock.core.user_code import message_of
from penstock.errors import Fail, InvalidInput, Retry
from penstock.jobs import queries as jobs
from penstock.jobs.models import Outcome, Settlement
from penstock.jobs.worked import NotStarted, SettledElsewhere
from penstock.worker.process import UnreadablePayload
from penstock.worker.running import Running

log = get_logger("penstock.worker")
_LONGEST_TRACEBACK = 8_000


def released(running: Running) -> Settlement:
    """Handed back as if it had not been claimed."""
    return Settlement(running.claimed.id, running.claimed.attempts, running.lease, Outcome.RELEASED)


def stopped(running: Running) -> Settlement:
    """What an attempt comes to that was told to stop, or was not to start."""
    claimed = running.claimed
    if running.reason == "cancelled":
        return Settlement(claimed.id, claimed.attempts, running.lease, Outcome.CANCELLED)
    if not running.entered:
        return released(running)
    if running.reason == "time limit":
        detail = {"type": "TimeLimit", "message": "the handler ran longer than its time limit"}
        text = orjson.dumps(detail).decode()
        return Settlement(claimed.id, claimed.attempts, running.lease, Outcome.FAILED, text, None, claimed.name)
    cause = "was taken for dead" if running.reason == "lost" else "shut down"
    detail = {"type": "Interrupted", "message": f"the worker {cause} before the handler was done"}
    text = orjson.dumps(detail).decode()
    if running.reason == "lost":
        # As others do with the jobs of the dead: the attempt is used, so that its number is not given twice.
        return Settlement(claimed.id, claimed.attempts, running.lease, Outcome.FAILED, text, timedelta(0))
    # With a detail the job counts as started, which an at_most_once job may be only once.
    return Settlement(claimed.id, claimed.attempts, running.lease, Outcome.RELEASED, text)


def settlement_of(running: Running, error: BaseException) -> Settlement | None:
    """What an attempt that raised comes to. None: it is settled elsewhere."""
    try:
        if isinstance(error, SettledElsewhere):
            return None
        if isinstance(error, NotStarted):
            return released(running)
        if isinstance(error, UnreadablePayload):
            return _quarantined(running, error)
        # Without a reason a cancellation is the handler's own doing.
        return _failed(running, error) if running.reason is None else stopped(running)
    except BaseException as failure:
        log.exception("job_failed_oddly", job_id=str(running.claimed.id))
        return _failed(running, failure)


def _quarantined(running: Running, error: Exception) -> Settlement:
    """Its payload cannot be read, by any attempt."""
    claimed = running.claimed
    detail = jobs.quarantined(f"its payload cannot be read: {message_of(error)}")
    return Settlement(claimed.id, claimed.attempts, running.lease, Outcome.QUARANTINED, detail)


def _failed(running: Running, error: BaseException) -> Settlement:
    claimed = running.claimed
    message = message_of(error)
    try:
        trace = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
    except Exception as failure:  # groups within groups without end, for one
        trace = f"(its traceback cannot be had: {type(failure).__name__})"
    detail = {
        "type": type(error).__qualname__,
        "message": message,
        "traceback": plain_text(trace),
    }
    final = isinstance(error, (Fail, InvalidInput))
    return Settlement(
        claimed.id,
        claimed.attempts,
        running.lease,
        Outcome.FAILED_FOR_GOOD if final else Outcome.FAILED,
        orjson.dumps(detail).decode(),
        error.after if isinstance(error, Retry) else None,
        claimed.name,
    )
