"""Whether this process measures itself. A process has one meter, as it has one set of metrics.

The parts ask for `meter` where something happens once for a batch, and keep it where something happens once for each job. None:
the process measures nothing, and keeps nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.core import tally as tallies

if TYPE_CHECKING:
    from penstock.core.meter import Meter
    from penstock.core.tally import Tally

meter: Meter | None = None
"""The meter of this process; None: nothing measures."""
# Blocks may overlap, where several applications run in one process: the meter is that of the last one that has not ended.
_meters: list[Meter] = []


def tally_of(database: object, names: Iterable[str], rates: bool | None) -> Tally | None:
    """The tally in which an executor notes each attempt that ended; None: nothing measures, and nothing is to be kept.

    Args:
        database: Database of the jobs.
        names: Job types that this process works on.
        rates: Whether this process writes rates.
    """
    if not rates and meter is None:
        return None
    tally = tallies.of(database)
    if meter is not None:
        meter.follow(tally)
        meter.expect(names)
    return tally


def measure() -> Meter:
    """The meter of this process; from now on it measures itself for as long as it lives."""
    from penstock.core.meter import Meter

    global meter
    if meter is None:
        meter = Meter()
        _meters.append(meter)
    return meter


@contextmanager
def measured() -> Iterator[Meter]:
    """Measure this process while the block lasts. Workers that start in the block are measured."""
    from penstock.core.meter import Meter

    global meter
    meter = own = Meter()
    _meters.append(own)
    try:
        yield own
    finally:
        _meters.remove(own)
        own.close()
        meter = _meters[-1] if _meters else None
