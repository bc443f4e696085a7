"""Passes results from the executor to the completer; the result of a job in a pool goes through its key queue."""

from __future__ import annotations

from penstock.jobs.models import Settlement
from penstock.pools.key_queues import KeyQueues
from penstock.worker.completer import Completer


class Results:
    """Receives results, and passes each to the completer, through the key queues of its pool when it has one.

    Args:
        completer: Settles the results.
    """

    def __init__(self, completer: Completer) -> None:
        self.completer = completer
        self._key_queues: list[KeyQueues] = []

    def register(self, key_queues: KeyQueues) -> None:
        """Pass the results of jobs in these key queues through them, and tell them which results are written."""
        self._key_queues.append(key_queues)
        self.completer.on_written.append(key_queues.written)

    def finish(self, result: Settlement) -> None:
        """Accept a result."""
        for key_queues in self._key_queues:
            if key_queues.holds(result.id):
                key_queues.finished(result)
                return
        self.completer.settle(result)
