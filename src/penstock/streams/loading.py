"""The load of any number of events by COPY: events become rows, each a chunk of one partition."""

from __future__ import annotations

import random
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import Any, TypeVar

from penstock.streams.accumulator import route
from penstock.streams.codec import Encoding
from penstock.streams.models import NewEvent
from penstock.streams.partitioner import Router

T = TypeVar("T")
_LOAD_ROUND = 100_000


async def rows_to_load(
    name: str, encoding: Encoding[T], items: Iterable[NewEvent[T] | T] | AsyncIterable[NewEvent[T] | T], router: Router
) -> AsyncIterator[tuple[Any, ...]]:
    """The rows of `penstock.loaded_chunks` for events, in rounds, so that any number of them needs the memory of one round.

    Args:
        name: Name of the stream.
        encoding: Encodes the events.
        items: Payloads, or `NewEvent`s.
        router: Maps keys to partitions. Events without a key go to another partition with each round.
    """
    gathered: list[NewEvent[T] | T] = []
    turn = random.randrange(router.partitions)
    async for item in _each(items):
        gathered.append(item)
        if len(gathered) >= _LOAD_ROUND:
            for row in _rows(name, encoding, gathered, router, turn):
                yield row
            gathered, turn = [], turn + 1
    for row in _rows(name, encoding, gathered, router, turn):
        yield row


def _rows(
    name: str, encoding: Encoding[T], items: Sequence[NewEvent[T] | T], router: Router, turn: int
) -> Iterable[tuple[Any, ...]]:
    routed, _ = route(encoding.columns(items), router, turn % router.partitions)
    columns, first = routed.columns, 0
    for partition, count in zip(routed.partitions, routed.counts, strict=True):
        last = first + count
        payloads = columns.payloads[first:last]
        yield (
            name,
            partition,
            count,
            columns.keys and columns.keys[first:last],
            columns.times and columns.times[first:last],
            columns.headers and columns.headers[first:last],
            None if columns.bytes else payloads,
            payloads if columns.bytes else None,
        )
        first = last


async def _each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
