"""Claims from queues, shared by all sources: where a claim starts in each queue, and what follows a claim that failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from penstock.core import measuring
from penstock.core.encryption import Keyring
from penstock.core.logs import get_logger
from penstock.core.spending import spending
from penstock.errors import DatabaseUnavailable, PenstockError
from penstock.jobs import claim_queries
from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.jobs.watermarks import Watermarks
from penstock.postgres.database import Database

log = get_logger("penstock.worker")
_SLOW_S = 0.05
_COST_KNOWN_S = 30.0


class WatermarkedClaims:
    """Claims from ready queues, each from its watermark on.

    Args:
        database: Database to claim from.
        keyring: Keys of encrypted payloads: a job that is encrypted with another key is not claimed.
    """

    def __init__(self, database: Database, keyring: Keyring | None = None) -> None:
        self._database = database
        self._keys = None if keyring is None else keyring.ids or None
        self.watermarks = Watermarks()
        self._seems_slow = False
        # What a full scan costs at most, and until when that is known.
        self._scan_cost_s, self._known_until = 2 * _SLOW_S, 0.0

    async def claim(
        self, holder: str, names: Sequence[str], limit: int, most: Sequence[int] | None = None, shared: bool = False
    ) -> list[ClaimedJob]:
        """Claim up to `limit` jobs of these types for a worker. `most`, `shared`: see `claim_queries.claim`."""
        now = time.monotonic()
        given = self.watermarks.for_claim(now)
        asked = not given and self._seems_slow and now >= self._known_until
        with spending() if asked else nullcontext() as spent:
            claim = await claim_queries.claim(self._database, holder, names, limit, given, self._keys, most, shared)
        if claim.jobs:
            self.watermarks.claimed(claim.jobs, claim.horizon, claim.ceiling, now)
        if not given:
            scanned_at = time.monotonic()
            took_s = scanned_at - now
            # A scan that seems slow may have waited, for a processor or a lock. What it costs is asked of the next one, and
            # seldom: to ask takes a transaction, and most scans are fast.
            self._seems_slow = took_s > _SLOW_S
            if spent is not None:
                self._scan_cost_s, self._known_until = spent.of(took_s), scanned_at + _COST_KNOWN_S
            self.watermarks.scanned(scanned_at, min(took_s, self._scan_cost_s) if len(claim.jobs) < limit else 0.0)
        return claim.jobs

    def full_scan(self) -> None:
        """Make the next claim without watermarks, since a job came back to its old place."""
        self.watermarks.full_scan()


class FailedClaims:
    """Cleans up after claims that failed.

    Args:
        database: Database to claim from.
        holder: Id of the worker or member that claims.
        names: The job types that it claims.
        known_leases: Leases of all claimed jobs, also of those whose results are not known to be written.
        fields: Further fields for the log.
    """

    def __init__(
        self,
        database: Database,
        holder: Callable[[], str],
        names: Callable[[], Sequence[str]],
        known_leases: Callable[[], Sequence[int]],
        **fields: str,
    ) -> None:
        self._database = database
        self._holder = holder
        self._names = names
        self._known_leases = known_leases
        self._fields = fields

    async def recover(self, error: PenstockError) -> None:
        """Quarantine the jobs for which a claim may have failed, and release those that it may have taken."""
        if isinstance(error, DatabaseUnavailable):
            log.warning("claim_failed", error=error, **self._fields)
        else:
            log.error("claim_refused", error=error, **self._fields)
            await self._quarantine()
        await self.release()

    async def release(self) -> None:
        """Release the jobs that a claim may have taken whose answer was lost."""
        try:
            await claim_queries.release_unknown(self._database, self._holder(), self._known_leases)
        except PenstockError as error:
            log.warning("release_failed", error=error, **self._fields)

    async def _quarantine(self) -> None:
        # The claim may have failed because one job cannot be read.
        try:
            done = await quarantine_unreadable(self._database, self._holder(), self._names(), self._known_leases)
        except PenstockError as error:
            log.warning("quarantine_failed", error=error, **self._fields)
        else:
            if done:
                log.error("jobs_quarantined", jobs=done, **self._fields)


async def quarantine_unreadable(database: Database, worker: str, names: Sequence[str], known: Callable[[], Sequence[int]]) -> int:
    """Quarantine unreadable jobs, after a claim that failed, or whose answer could not be read, because of one of its jobs.

    Jobs that the worker holds without knowing are read one by one; those that can be read remain for `release_unknown`.

    Returns the number of quarantined jobs.
    """
    done = await claim_queries.quarantine_unreadable(database, names)
    for id, attempt, lease in await claim_queries.held_jobs(database, worker, known()):
        try:
            problem = None if await claim_queries.can_show(database, worker, id) else "its payload is larger than 4 MiB as text"
        except DatabaseUnavailable:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            detail = claim_queries.quarantined(problem)
            await claim_queries.settle(database, [Settlement(id, attempt, lease, Outcome.QUARANTINED, detail)])
            if measuring.meter is not None:
                measuring.meter.quarantined(names[0] if len(names) == 1 else None, 1)
            done += 1
    return done
