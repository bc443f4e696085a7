"""How far consumer groups are, and whether they saw events in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from penstock import Backoff, Stream
from penstock.errors import NotFound
from penstock.streams.group_models import Lag

KEYS = "ABCDEFGHIJ"
AT_ONCE = Backoff(base=timedelta(0), cap=timedelta(0))


async def lag(stream: Stream[Any], group: str) -> int:
    return sum(lag.lag for lag in await stream.lag(group))


async def lags(stream: Stream[Any], group: str) -> list[Lag]:
    """How far a group is; none before its first consumer has started."""
    try:
        return await stream.lag(group)
    except NotFound:
        return []


def caught_up(stream: Stream[Any], group: str) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        found = await lags(stream, group)
        return bool(found) and not any(lag.lag for lag in found)

    return check


def in_order(seen: list[tuple[str | None, int]]) -> bool:
    latest: dict[str | None, int] = defaultdict(lambda: -1)
    for key, n in seen:
        if n <= latest[key]:
            return False
        latest[key] = n
    return True
