"""The children that the handler of a job adds to job groups: those of an earlier attempt have the same ids, and are found again.

A handler that fails is called again, and enqueues its children again. So a child that is given no id gets one that follows from
the group and the job (by a secret that only the holder of the job learns, `penstock.fill_group`), and from what the child is: its
type, key and payload, and how many of the same were enqueued before it in this attempt. The order of the children does not
matter, and neither does what an attempt leaves out or adds. The children of a durable step are counted apart: a further attempt
leaves out a step that is done, and what follows it is still the same.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from uuid import UUID

_step: ContextVar[str] = ContextVar("penstock_step", default="")


@contextmanager
def in_step(name: str) -> Iterator[None]:
    """Around the function of a durable step."""
    token = _step.set(name)
    try:
        yield
    finally:
        _step.reset(token)


class Filling:
    """The job groups that the handler of one attempt fills."""

    def __init__(self) -> None:
        self._seeds: dict[UUID, bytes] = {}
        self._made: Counter[bytes] = Counter()
        # Handlers may enqueue from several threads.
        self._lock = threading.Lock()

    def begin(self, group: UUID, seed: UUID) -> None:
        """Fill a group, from whose seed the ids of its children follow."""
        self._seeds[group] = seed.bytes

    def __contains__(self, group: object) -> bool:
        return group in self._seeds

    def child_id(self, group: UUID, name: str, key: str | None, data: str) -> UUID:
        """The id of the next child of this type, key and payload."""
        seed = self._seeds[group]
        of_key = b"-" if key is None else b"+" + key.encode()
        what = b"\0".join((seed, _step.get().encode(), name.encode(), of_key, data.encode()))
        child = hashlib.sha256(what).digest()
        with self._lock:
            number = self._made[child]
            self._made[child] += 1
        digest = hashlib.sha256(child + number.to_bytes(8, "big")).digest()
        # A UUIDv7 of the time of the group: what looks for it in the archive looks at the days since then.
        made = bytearray(group.bytes[:6] + digest[:10])
        made[6] = 0x70 | made[6] & 0x0F
        made[8] = 0x80 | made[8] & 0x3F
        return UUID(bytes=bytes(made))
