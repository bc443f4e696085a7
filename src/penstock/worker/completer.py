"""The completer: settles results in batches, each of all results that came while the batch before was under way."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import orjson

from penstock.core import measuring
from penstock.core import tally as tallies
from penstock.core.coalescing import in_halves
from penstock.core.logs import get_logger, payloads_shown
from penstock.errors import PenstockError
from penstock.jobs import claim_queries
from penstock.jobs.models import Outcome, Settlement
from penstock.postgres.database import Database
from penstock.worker.reports import Reports

log = get_logger("penstock.worker")
_MOST_AT_ONCE = 5_000
_BACK = frozenset(("retried", "released", "snoozed", "suspended"))


class Completer:
    """Settles the results of one process.

    Args:
        database: Database to settle in.
        version: Version of the application's code, which the errors of its handlers get; None: it is not known.

    Attributes:
        reports: Writes what the jobs report before they are settled.
    """

    def __init__(self, database: Database, version: str | None = None) -> None:
        self._database = database
        self._version = version
        self._tally = tallies.of(database)
        self.reports = Reports(database)
        self.on_written: list[Callable[[Sequence[Settlement], Mapping[UUID, str]], None]] = []
        """Called with results that are in the database, and with the outcomes of those that are not plain successes."""
        self.on_retried: list[Callable[[], None]] = []
        """Called when jobs went back to the queue, since they may be due soon."""
        self._results: list[Settlement] = []
        self._writing: list[Settlement] = []
        # Leases of results that could not be written. They end by themselves, the oldest long before 10,000 more have come.
        self._left: deque[int] = deque(maxlen=10_000)
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.settled = 0
        """How many results have been written, or found stale."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def settle(self, result: Settlement) -> None:
        """Accept a result, which is written soon."""
        if not self._results:
            self._idle.clear()
            self._arrived.set()
        self._results.append(result)

    def unsettled_leases(self) -> set[int]:
        """Leases of results that are not known to be written, whose jobs must not be released."""
        return {result.lease for result in self._writing + self._results} | set(self._left)

    async def run(self) -> None:
        """Settle until cancelled."""
        while True:
            await self._arrived.wait()
            batch, self._results = self._results[:_MOST_AT_ONCE], self._results[_MOST_AT_ONCE:]
            if batch:
                self._writing = batch
                await self.reports.ended(batch)
                began = time.monotonic()
                outcomes = await self._write(batch)
                names = [result.name for result in batch]
                others = [(one.name, _became(one, outcomes)) for one in batch if one.id in outcomes] if outcomes else []
                self._tally.settled(names, others)
                if (meter := measuring.meter) is not None:
                    meter.settled(names, others, time.monotonic() - began)
                self._report(batch, outcomes)
                self._writing = []
                self.settled += len(batch)
                for tell in self.on_written:
                    tell(batch, outcomes)
                while self._waiting and self._waiting[0][0] <= self.settled:
                    waiting = self._waiting.popleft()[1]
                    if not waiting.done():
                        waiting.set_result(None)
            if not self._results:
                self._arrived.clear()
                self._idle.set()

    async def drained(self) -> None:
        """Wait until all results so far, and those that come meanwhile, are written."""
        await self._idle.wait()

    async def caught_up(self) -> None:
        """Wait until all results so far are written; results that come meanwhile do not prolong the wait."""
        if ahead := len(self._writing) + len(self._results):
            written = asyncio.get_running_loop().create_future()
            self._waiting.append((self.settled + ahead, written))
            await written

    async def _write(self, batch: list[Settlement]) -> dict[UUID, str]:
        # One result that cannot be written must not stop the others, nor the worker.
        settle = partial(claim_queries.settle, self._database, version=self._version)
        written = await in_halves(batch, settle, self._refuse)
        return written[0] if len(written) == 1 else {id: outcome for part in written for id, outcome in part.items()}

    async def _refuse(self, results: Sequence[Settlement], error: PenstockError) -> dict[UUID, str]:
        (result,) = results
        log.error("job_result_refused", **_fields(result), error=error)
        detail = orjson.dumps({"type": type(error).__name__, "message": f"the result was refused: {error.message}"}).decode()
        try:
            return await claim_queries.settle(
                self._database, [result._replace(outcome=Outcome.FAILED, detail=detail, retry_after=None)]
            )
        except PenstockError as again:
            # Its lease stays known, so that the job is not released: an at_most_once job would start again.
            self._left.append(result.lease)
            log.error("job_left_to_its_lease", **_fields(result), lease=result.lease, error=again)
            return {result.id: "stale"}

    def _report(self, batch: Sequence[Settlement], outcomes: dict[UUID, str]) -> None:
        if not outcomes:
            return
        for result in batch:
            outcome = outcomes.get(result.id)
            if outcome == "stale":
                log.warning("job_result_stale", **_fields(result), lease=result.lease)
            elif result.outcome in (Outcome.FAILED, Outcome.FAILED_FOR_GOOD, Outcome.QUARANTINED):
                # The message comes from the handler and may hold the payload: the row of the job keeps it, the log does not.
                failure = orjson.loads(result.detail) if result.detail else {}
                # No retry mends what a quarantine says: a person has to look.
                write = log.warning if result.outcome is Outcome.QUARANTINED else log.info
                write(
                    "job_" + (_became(result, outcomes) if outcome else "settled"),
                    **_fields(result),
                    error_type=failure.get("type"),
                    error=failure.get("message") if payloads_shown() else None,
                )
            elif result.outcome is Outcome.SNOOZED:
                log.info("job_" + (outcome or "settled"), **_fields(result))
            elif result.outcome is Outcome.SUSPENDED:
                log.debug("job_" + (outcome or "settled"), **_fields(result))
        if not _BACK.isdisjoint(outcomes.values()):
            for tell in self.on_retried:
                tell()


def _became(result: Settlement, outcomes: Mapping[UUID, str]) -> str:
    """What became of a job, for the metrics."""
    outcome = outcomes[result.id]
    return "quarantined" if result.outcome is Outcome.QUARANTINED and outcome == "failed" else outcome


def _fields(result: Settlement) -> dict[str, Any]:
    """What every line of the log about a job says."""
    fields = {"job_id": str(result.id), "job_type": result.name or None, "key": result.key, "attempt": result.attempt}
    return fields if result.trace_id is None else {**fields, "trace_id": result.trace_id}
