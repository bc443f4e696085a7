"""The way of a result: from the executor, through the key queues of the pool that its job is of, to the completer."""

from __future__ import annotations

from penstock.jobs.models import Settlement
from penstock.pools.key_queues import KeyQueues
from penstock.worker.completer import Completer


class Results:
    """Takes results, and sends each by its pool to the completer.

    Args:
        completer: Settles them.
    """

    def __init__(self, completer: Completer) -> None:
        self.completer = completer
        self._key_queues: list[KeyQueues] = []

    def register(self, key_queues: KeyQueues) -> None:
        """From now on results of jobs in these key queues go by them, and these are told what was written."""
        self._key_queues.append(key_queues)
        self.completer.on_written.append(key_queues.written)

    def finish(self, result: Settlement) -> None:
        """Take a result."""
        for key_queues in self._key_queues:
            if key_queues.holds(result.id):
                key_queues.finished(result)
                return
        self.completer.settle(result)
