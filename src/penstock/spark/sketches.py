"""Merges sketches of numbers that Spark made (KLL, Apache DataSketches) and reads their quantiles, without Spark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

QUANTILES = (0.5, 0.95, 0.99)


def merged(sketches: Iterable[bytes | None]) -> bytes | None:
    """One sketch of all values of several sketches; None when there are no values."""
    from datasketches import kll_doubles_sketch

    total = None
    for sketch in sketches:
        if sketch is None:
            continue
        found = kll_doubles_sketch.deserialize(bytes(sketch))
        if total is None:
            total = found
        else:
            total.merge(found)
    return None if total is None or total.is_empty() else bytes(total.serialize())


def quantiles(sketch: bytes | None, ranks: Sequence[float] = QUANTILES) -> list[float | None]:
    """The values at the given ranks; None for each when there is no sketch."""
    from datasketches import kll_doubles_sketch

    if sketch is None:
        return [None] * len(ranks)
    found = kll_doubles_sketch.deserialize(bytes(sketch))
    return [float(found.get_quantile(rank)) for rank in ranks]
