"""Places that several names share, so that none of them can take all: half of the places is divided, the other half goes to the
names that need it. Each name gets at least one place, whichever names hold the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable


class Shares:
    """Places of one process, such as its connections to a service.

    Args:
        places: How many there are. More names than half of them make it one place for each and half of them in common.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._names: set[str] = set()
        self._used: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._share = self._common = places
        self._taken = self._in_common = 0

    def divide(self, names: Iterable[str]) -> None:
        """Divide them among these names from now on. What is taken stays taken."""
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
        """How many wait for a place."""
        return len(self._waiting.get(name, ()))

    def take(self, name: str) -> None:
        """Take a place, whether one is free or not."""
        self._in_common += self._used[name] >= self._share
        self._taken += 1
        self._used[name] += 1

    async def wait(self, name: str) -> None:
        """Take a place, when one is free. Those of one name get theirs in the order in which they came."""
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
            elif (line := self._waiting.get(name)) is not None and turn in line:
                line.remove(turn)
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
            # One for each in its turn.
            for name in list(self._waiting):
                line = self._waiting.pop(name)
                while line and line[0].done():
                    line.popleft()
                if line and self.free(name):
                    line.popleft().set_result(None)
                    self.take(name)
                    granted = True
                if line:
                    self._waiting[name] = line
