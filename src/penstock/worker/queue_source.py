"""The queues of a worker's job types as a source of its fetcher: it decides which types to claim, and how many jobs at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Protocol
from uuid import UUID

from penstock.core.encryption import Keyring
from penstock.errors import PenstockError
from penstock.jobs import claim_queries, worker_queries
from penstock.jobs.claiming import FailedClaims, WatermarkedClaims
from penstock.jobs.fetcher import Look
from penstock.jobs.models import ClaimedJob
from penstock.jobs.worked import WorkedType
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.worker.completer import Completer
from penstock.worker.executor import Executor
from penstock.worker.registration import Registration

QUIET_S = 0.02
_PLACES_EVERY_S = 0.02
_FENCED_S = 0.1


class AdmissionControl(Protocol):
    """Decides before each claim what may be claimed now."""

    def admit(self, names: list[str], limit: int) -> tuple[list[str], int]:
        """Those of the job types that may be claimed, and at most how many jobs."""


class AdmitAll:
    """Admits every job type."""

    def admit(self, names: list[str], limit: int) -> tuple[list[str], int]:
        """See `AdmissionControl`."""
        return names, limit


class QueueSource:
    """The queues of some job types. A `Source`, and a `RunsAlone`, since its jobs can run alone.

    Args:
        database: Database to claim from.
        types: The job types to claim.
        settings: Size of a batch.
        registration: The id for which jobs are claimed, and whether other workers may have taken it for dead.
        executor: Receives the jobs.
        completer: Knows which results are not settled yet.
        admission: Decides what may be claimed now.
        keyring: Keys of encrypted payloads.
    """

    def __init__(
        self,
        database: Database,
        types: Mapping[str, WorkedType],
        settings: Settings,
        registration: Registration,
        executor: Executor,
        completer: Completer,
        admission: AdmissionControl,
        keyring: Keyring,
    ) -> None:
        self._database = database
        self._claim_limit = settings.claim_limit
        self._registration = registration
        self._executor = executor
        self._completer = completer
        self._admission = admission
        self._keyring = keyring
        # Of each lane, since a full scan by the claim of one lane does not look at the types of the others.
        self._claims: dict[str, WatermarkedClaims] = {}
        self._failed = FailedClaims(database, lambda: registration.id, self.types_apart, self.known_leases)
        self._names: dict[str, list[str]] = {}
        self._types: Mapping[str, WorkedType] = {}
        self._ask_for_places_at = 0.0
        self.waits_for_places = False
        self.work_on(types)

    def work_on(self, types: Mapping[str, WorkedType]) -> None:
        """Claim these types from now on."""
        names: dict[str, list[str]] = {}
        for worked in types.values():
            names.setdefault(worked.lane, []).append(worked.name)
        self._names = names
        self._types = types
        self._claims = {lane: self._claims.get(lane) or WatermarkedClaims(self._database, self._keyring) for lane in names}

    def full_scan(self) -> None:
        """Look below the watermarks: a job came back to its old place."""
        for claims in self._claims.values():
            claims.full_scan()

    def known_leases(self) -> list[int]:
        """Leases of jobs in flight, and of finished jobs that are not settled yet."""
        return [*self._executor.leases(), *self._completer.unsettled_leases()]

    # -- see `Source`

    def blocked_s(self) -> float | None:
        """See `Source`. While other workers may have taken this one for dead, it waits for its next heartbeat."""
        return None if self._registration.may_start() else _FENCED_S

    async def look(self) -> Look:
        """See `Source`."""
        asked, claimed, room, full = await self._claim()
        wanted = await self._wait_for_places(claimed) if claimed < asked else None
        self.waits_for_places = wanted is not None
        return Look(
            claimed,
            full=not room and not claimed,
            partly_full=full,
            wanted=wanted,
            only_wanted=wanted is not None and len(wanted.names) == len(self._types),
            due_in_s=None if wanted is None else wanted.due_in_s,
        )

    async def announce(self) -> None:
        """See `Source`."""
        await worker_queries.wait_for_jobs(self._database, self._registration.id, self.types_apart())

    async def recover(self, error: PenstockError) -> None:
        """See `Source`."""
        await self._failed.recover(error)

    # -- see `RunsAlone`

    @property
    def empty(self) -> bool:
        """See `RunsAlone`."""
        return self._executor.in_flight == 0

    def types_apart(self) -> list[str]:
        """See `RunsAlone`."""
        return [name for names in self._names.values() for name in names]

    async def next_alone(self) -> UUID | None:
        """See `RunsAlone`."""
        return await claim_queries.next_alone(self._database, self.types_apart(), keys=self._keyring.ids or None)

    def hand_back(self) -> None:
        """See `RunsAlone`."""
        self._executor.give_back(self._executor.jobs_of(self.types_apart()))

    async def claim_alone(self) -> list[ClaimedJob]:
        """See `RunsAlone`."""
        now = time.monotonic()
        try:
            found = await claim_queries.claim_alone(
                self._database, self._registration.id, self.types_apart(), keys=self._keyring.ids or None
            )
        except PenstockError:
            await self._failed.release()
            raise
        jobs = [job for job, _ in found]
        if jobs:
            self._executor.submit(jobs, now)
        return jobs

    async def _claim(self) -> tuple[int, int, bool, bool]:
        """Claim for each lane. Returns the jobs asked for and claimed, whether a lane had room, and whether one had none."""
        asked = claimed = 0
        room = full = False
        for lane, names in list(self._names.items()):
            admitted, limit = self._admission.admit(names, self._claim_limit)
            if not admitted:
                continue
            now = time.monotonic()
            plan = self._executor.plan(admitted, limit)
            room |= plan.room
            full |= plan.full
            # The types may have changed since the claim of the lane before.
            if plan.limit <= 0 or lane not in self._claims:
                continue
            asked += plan.limit
            found = await self._claims[lane].claim(self._registration.id, plan.names, plan.limit, plan.most, shared=True)
            if found:
                self._executor.submit(found, now)
                claimed += len(found)
            self._executor.looked(plan, Counter([job.name for job in found]))
        return asked, claimed, room, full

    async def _wait_for_places(self, claimed: int) -> claim_queries.PlacesWanted | None:
        limited = [worked.name for worked in self._types.values() if worked.limited and not worked.sealer.locked]
        # While other types keep the worker busy, it asks for places only at intervals.
        if not limited or (claimed and time.monotonic() < self._ask_for_places_at):
            return None
        self._ask_for_places_at = time.monotonic() + _PLACES_EVERY_S
        watermarks: dict[str, dict[str, int]] = {}
        for claims in self._claims.values():
            watermarks |= claims.watermarks.for_claim(time.monotonic())
        return await claim_queries.wait_for_places(self._database, self._registration.id, limited, watermarks)
