"""Places that several job types share, so that none of them can take all.

Half of the places are divided among the names of the types; the other half goes to the names that need it. Each name gets at
least one place, whichever names hold the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable


class Shares:
    """Places of one process, such as its connections to a service.

    Args:
        places: Number of places. When there are more names than half of the places, each name has one, and half of the places are
            common.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._names: set[str] = set()
        self._used: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._share = self._common = places
        self._taken = self._in_common = 0

    def divide(self, names: Iterable[str]) -> None:
        """Divide the places among these names from now on. Places that are taken stay taken."""
        self._names = set(names)
        count = max(len(self._names), 1)
        self._share = max(1, self._places // (2 * count))
        self._common = max(self._places - self._share * count, self._places // 2)
        self._in_common = sum(used - self._share for used in self._used.values() if used > self._share)
        self._grant()

    @property
    def vacant(self) -> int:
        """Number of free places."""
        return max(0, self._places - self._taken)

    def free(self, name: str) -> bool:
        """Whether a place is free for `name`."""
        return self._used[name] < self._share or self._in_common < self._common

    def waiting(self, name: str) -> int:
        """Number of callers that wait for a place."""
        return len(self._waiting.get(name, ()))

    def take(self, name: str) -> None:
        """Take a place, whether one is free or not."""
        self._in_common += self._used[name] >= self._share
        self._taken += 1
        self._used[name] += 1

    async def wait(self, name: str) -> None:
        """Wait for a place and take it. The callers of one name get places in the order of their calls."""
        if not self.waiting(name) and self.free(name):
            self.take(name)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(name)
            elif (queue := self._waiting.get(name)) is not None and turn in queue:
                queue.remove(turn)
            raise

    def give(self, name: str) -> None:
        """Give a place back."""
        self._in_common -= self._used[name] > self._share
        self._taken -= 1
        self._used[name] -= 1
        if not self._used[name]:
            del self._used[name]
        self._grant()

    def _grant(self) -> None:
        granted = True
        while granted:
            granted = False
            # One place for each name in turn.
            for name in list(self._waiting):
                queue = self._waiting.pop(name)
                while queue and queue[0].done():
                    queue.popleft()
                if queue and self.free(name):
                    queue.popleft().set_result(None)
                    self.take(name)
                    granted = True
                if queue:
                    self._waiting[name] = queue
