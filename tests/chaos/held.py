"""Batches that consumers hold until they have been frozen, so that their commits come too late.

Each held batch has a note, which is a file. A consumer writes the note and holds the batch. It is frozen until another consumer
owns the partition and has written a note of its own, and then continues at once. The other consumer waits until the first has
tried its late commit.
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
    """A batch of a partition that a worker process holds, under the epoch of its member."""

    partition: int
    epoch: int
    worker: str

    @property
    def name(self) -> str:
        """Name of the note."""
        return f"{self.partition}.{self.epoch}.{self.worker}"

    def later_than(self, other: Held) -> bool:
        """Whether this batch belongs to a later owner of the partition than the other batch."""
        return self.partition == other.partition and self.epoch > other.epoch


def notes(folder: Path, thawed: bool = False) -> list[Held]:
    """The held batches, or (thawed) those that are about to be committed."""
    found = [path.name.split(".") for path in folder.iterdir()]
    return [Held(int(parts[0]), int(parts[1]), parts[2]) for parts in found if (_THAWED in parts) == thawed]


def thaw(folder: Path, worker: str) -> None:
    """Let a worker continue with the batches that it holds."""
    for each in notes(folder):
        if each.worker == worker:
            # A later owner may have removed the note after its wait timed out.
            with suppress(FileNotFoundError):
                (folder / each.name).rename(folder / f"{each.name}.{_THAWED}")


def forget(folder: Path, worker: str) -> None:
    """Remove the notes of a worker that was killed."""
    _forget(folder, [each for each in _all(folder) if each.worker == worker])


def older_than(folder: Path, own: Held) -> list[Held]:
    """The batches of earlier owners of the same partition that they have not tried to commit."""
    return [each for each in _all(folder) if own.later_than(each)]


@contextmanager
def noted(folder: Path, own: Held) -> Iterator[None]:
    """Keep a note of a batch for the duration of the block."""
    (folder / own.name).touch()
    try:
        yield
    finally:
        _forget(folder, [own])


def hold(folder: Path, own: Held, older: Sequence[Held]) -> None:
    """Block until earlier owners have tried their commits, or, without any, until the process was frozen and thawed."""
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
    """Wait for a limited time: the process to wait for may be killed, and not every process that holds a batch is frozen."""
    end = time.monotonic() + _MOST_S
    while not ready() and time.monotonic() < end:
        time.sleep(0.01)
