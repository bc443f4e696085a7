"""The span of an attempt: from the start of the handler to the settlement that follows from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson

from penstock.core.tracing import Tracing
from penstock.jobs.models import Outcome, Settlement
from penstock.worker.running import Running

_FAILURES = (Outcome.FAILED, Outcome.FAILED_FOR_GOOD, Outcome.QUARANTINED)


async def run_traced(
    tracing: Tracing, run: Callable[[Running], Awaitable[Settlement | None]], running: Running
) -> Settlement | None:
    """Run an attempt in the context of its span. The task is that of the attempt, so that the context ends with it.

    Args:
        tracing: Makes the span.
        run: Runs the attempt. Returns its settlement, which is on its way; None: there is none.
        running: The job.
    """
    claimed = running.claimed
    # The call of a batch has one span for all of its jobs.
    if running.worked.batch is not None or tracing.is_skipped(claimed.traceparent):
        return await run(running)
    span = tracing.start_processing(
        claimed.name,
        (claimed.traceparent,),
        claimed.attempt,
        {"messaging.message.id": str(claimed.id), "penstock.attempt": claimed.attempt},
    )
    tracing.enter(span)
    running.traceparent = tracing.traceparent_of(span) or running.traceparent
    settlement = await run(running)
    if settlement is None:
        tracing.end(span)
    else:
        failed = settlement.outcome in _FAILURES
        tracing.end(span, error_type(settlement.detail) if failed else None, str(settlement.outcome))
    return settlement


def error_type(detail: str | None) -> str:
    """The class of the error in a settlement's detail, JSON text."""
    found = orjson.loads(detail) if detail else None
    return str(found["type"]) if isinstance(found, dict) and "type" in found else "_OTHER"
