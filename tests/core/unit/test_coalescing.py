"""Items that are written in one call, of which the database refuses some."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.core.coalescing import in_halves
from penstock.errors import Conflict, DatabaseUnavailable, InvalidInput, PenstockError


class Writer:
    """Refuses calls with one of these items, and writes all others."""

    def __init__(self, bad: set[int], error: type[PenstockError] = InvalidInput) -> None:
        self.bad = bad
        self.error = error
        self.written: list[int] = []
        self.refusals: list[list[int]] = []

    async def write(self, items: Sequence[int]) -> str:
        if self.bad.intersection(items):
            raise self.error(f"one of {items}")
        self.written += items
        return f"written {list(items)}"

    async def refused(self, items: Sequence[int], error: PenstockError) -> str:
        self.refusals.append(list(items))
        return f"refused {list(items)}"


@pytest.mark.parametrize("bad", [set[int](), {0}, {9}, {3, 4}, {0, 3, 7, 9}, set(range(10))])
async def test_items_that_are_refused_fail_no_others(bad: set[int]) -> None:
    writer = Writer(bad)
    said = await in_halves(range(10), writer.write, writer.refused)
    assert writer.written == [item for item in range(10) if item not in bad]
    assert writer.refusals == [[item] for item in sorted(bad)]
    assert [item for each in said for item in map(int, each.split(" ", 1)[1].strip("[]").split(", "))] == list(range(10))


async def test_an_error_that_is_about_no_item_refuses_them_together() -> None:
    writer = Writer({3}, DatabaseUnavailable)
    assert await in_halves(range(10), writer.write, writer.refused, DatabaseUnavailable) == [f"refused {list(range(10))}"]
    assert writer.written == []


async def test_what_refused_raises_ends_the_call() -> None:
    writer = Writer({3})

    async def refused(items: Sequence[int], error: PenstockError) -> str:
        raise Conflict("no further") from error

    with pytest.raises(Conflict):
        await in_halves(range(10), writer.write, refused)
    assert writer.written == [0, 1, 2]
