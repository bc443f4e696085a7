"""The partitioner: from a key to a bucket to a partition, the same as in SQL. Pure.

The hash of a key selects one of 4,096 buckets, and the jump hash maps a bucket to a partition. When a stream grows, buckets move
only to new partitions, never between old ones; this makes it possible to keep the order of each key while the stream grows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from penstock.groups.assignors import jump_hash, key_hash

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
    """The partition of a key in a stream with this number of partitions (`penstock.partition_of` in SQL).

    >>> partition_of("N14228", 16)
    11
    """
    return routes_of(partitions)[bucket_of(key)]


class Router:
    """Maps the keys of one stream to partitions, and caches those that it has seen.

    Args:
        partitions: Number of partitions.
    """

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self._routes = routes_of(partitions)
        self._seen: dict[str | None, int] = {}

    def partitions_of(self, keys: Sequence[str | None], keyless: int) -> list[int]:
        """The partition of each key; `keyless` for those that are None."""
        seen = self._seen
        if len(seen) > _REMEMBERED:
            seen.clear()
        with suppress(KeyError):  # usually all of them were seen before
            return [seen[key] for key in keys]
        partitions = []
        for key in keys:
            if key is None:
                partitions.append(keyless)
                continue
            partition = seen.get(key)
            if partition is None:
                partition = seen[key] = self._routes[bucket_of(key)]
            partitions.append(partition)
        return partitions
