"""Where an event goes: from its key to a bucket to a partition, the same as in SQL. Pure.

A key has one of 4,096 buckets by its hash, and the jump hash says to which partition a bucket goes. With more partitions
buckets only move to new partitions, never between old ones; that is what makes it possible to keep the order of each key
while a stream grows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from penstock.ownership.assign import jump_hash, key_hash

BUCKETS = 4096
_REMEMBERED = 100_000


def bucket_of(key: str) -> int:
    """The bucket of a key: the low twelve bits of `key_hash` (`penstock.bucket_of` in SQL)."""
    digest = hashlib.sha256(key.encode()).digest()
    return (digest[6] & 15) << 8 | digest[7]


@lru_cache(maxsize=64)
def routes_of(partitions: int) -> tuple[int, ...]:
    """The partition of each bucket (`penstock.routes_of` in SQL)."""
    return tuple(jump_hash(key_hash(str(bucket)), partitions) for bucket in range(BUCKETS))


def partition_of(key: str, partitions: int) -> int:
    """The partition of a key in a stream of so many partitions (`penstock.partition_of` in SQL).

    >>> partition_of("N14228", 16)
    11
    """
    return routes_of(partitions)[bucket_of(key)]


class Router:
    """Routes the keys of one stream, and remembers those that it has seen.

    Args:
        partitions: Number of partitions.
    """

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self._routes = routes_of(partitions)
        self._seen: dict[str, int] = {}

    def places(self, keys: Sequence[str | None], keyless: int) -> list[int]:
        """The partition of each key; `keyless` for those that are None."""
        seen = self._seen
        if len(seen) > _REMEMBERED:
            seen.clear()
        places = []
        for key in keys:
            if key is None:
                places.append(keyless)
                continue
            place = seen.get(key)
            if place is None:
                place = seen[key] = self._routes[bucket_of(key)]
            places.append(place)
        return places
