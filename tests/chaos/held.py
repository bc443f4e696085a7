"""Batches that consumers keep in hand until they have been frozen: the occasion for a commit that comes too late.

A note of each is a file. A consumer writes it and keeps the batch; it is frozen until another consumer has the partition, and
a note of its own; then it goes on at once. The other one waits until the late commit was tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_MOST_S = 5.0
_THAWED = "thawed"


@dataclass(frozen=True, slots=True)
class Held:
    """A batch of a partition that a worker process has in hand, under the epoch of its member."""

    partition: int
    epoch: int
    worker: str

    @property
    def name(self) -> str:
        """Name of its note."""
        return f"{self.partition}.{self.epoch}.{self.worker}"

    def later_than(self, other: Held) -> bool:
        """Whether it is one of an owner that came after the other's."""
        return self.partition == other.partition and self.epoch > other.epoch


def notes(folder: Path, thawed: bool = False) -> list[Held]:
    """What is held, or is thawed and about to be committed."""
    found = [path.name.split(".") for path in folder.iterdir()]
    return [Held(int(parts[0]), int(parts[1]), parts[2]) for parts in found if (_THAWED in parts) == thawed]


def thaw(folder: Path, worker: str) -> None:
    """Let a worker go on with what it holds."""
    for each in notes(folder):
        if each.worker == worker:
            # Another one may have given up waiting for it.
            with suppress(FileNotFoundError):
                (folder / each.name).rename(folder / f"{each.name}.{_THAWED}")


def forget(folder: Path, worker: str) -> None:
    """Take away the notes of a worker that was killed."""
    _forget(folder, [each for each in _all(folder) if each.worker == worker])


def older_than(folder: Path, own: Held) -> list[Held]:
    """What members before hold of the same partition, and have not tried to commit."""
    return [each for each in _all(folder) if own.later_than(each)]


@contextmanager
def noted(folder: Path, own: Held) -> Iterator[None]:
    """With a note of it."""
    (folder / own.name).touch()
    try:
        yield
    finally:
        _forget(folder, [own])


def hold(folder: Path, own: Held, older: Sequence[Held]) -> None:
    """Block until members before have tried their commits, or, when there are none, until the process was frozen and thawed."""
    if older:
        _until(lambda: not older_than(folder, own))
        _forget(folder, older)
    else:
        _until(lambda: not (folder / own.name).exists())


def _all(folder: Path) -> list[Held]:
    return [*notes(folder), *notes(folder, thawed=True)]


def _forget(folder: Path, held: Sequence[Held]) -> None:
    for each in held:
        (folder / each.name).unlink(missing_ok=True)
        (folder / f"{each.name}.{_THAWED}").unlink(missing_ok=True)


def _until(ready: Callable[[], bool]) -> None:
    """Not for ever: whom it waits for may be killed, and not each process that holds something is frozen."""
    end = time.monotonic() + _MOST_S
    while not ready() and time.monotonic() < end:
        time.sleep(0.01)
