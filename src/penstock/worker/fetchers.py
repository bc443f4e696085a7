"""The fetchers of one worker: one claims from its queues, and one from each of its pools."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from penstock.jobs.fetcher import Fetcher
from penstock.jobs.models import Settlement
from penstock.jobs.worked import WorkedType
from penstock.pools.service import PoolService
from penstock.postgres.notifications import Kind, Notifications
from penstock.worker.queue_source import QueueSource


class Fetchers:
    """The fetchers of one worker.

    Args:
        queues: Fetcher of the queues; None: the worker claims in pools only.
        pools: The pools, each of which has a fetcher when it runs jobs.

    Attributes:
        all: All of them.
    """

    def __init__(self, queues: Fetcher[QueueSource] | None, pools: Sequence[PoolService]) -> None:
        self.queues = queues
        self.all: list[Fetcher[Any]] = [] if queues is None else [queues]
        self.all += [pool.fetcher for pool in pools if pool.fetcher is not None]

    def subscribe(self, notifications: Notifications) -> None:
        """Subscribe to the notifications about queues; pools subscribe their own."""
        notifications.wake(self.look, Kind.JOBS, Kind.PLACE)
        notifications.wake(self.announce_again, Kind.CONNECTED, Kind.LISTENING)
        notifications.wake(self.full_scan, Kind.FULL_SCAN)

    def look(self) -> None:
        """Jobs or places may have come in a queue: look for them."""
        if self.queues is not None:
            self.queues.wake()
            self.queues.room_made()

    def announce_again(self) -> None:
        """The types or the worker's id have changed, or a registration may be lost: register as idle again, and look."""
        if self.queues is not None:
            self.queues.announce_again()
        self.look()

    def wake_all(self) -> None:
        """Due jobs of any type and pool have become ready."""
        for fetcher in self.all:
            fetcher.wake()

    def full_scan(self) -> None:
        """A job came back to its old place in a queue."""
        if self.queues is not None:
            self.queues.source.full_scan()
            self.queues.wake()

    def written(self, results: Sequence[Settlement], outcomes: Mapping[UUID, str]) -> None:
        """Results are written: a limited type may have a place again."""
        if self.queues is not None and self.queues.source.waits_for_places:
            self.queues.wake()

    def work_on(self, types: Mapping[str, WorkedType]) -> None:
        """Claim these types, which have changed, from now on."""
        if self.queues is not None:
            self.queues.source.work_on(types)
        self.announce_again()

    def idle_s(self) -> list[float]:
        """For how many seconds each has made no progress."""
        now = time.monotonic()
        return [now - fetcher.progressed_at for fetcher in self.all]
