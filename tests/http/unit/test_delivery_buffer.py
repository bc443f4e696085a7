"""How much of a topic waits in this process for one connection."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

from penstock.http.topics.delivery_buffer import Copy, DeliveryBuffer

NOW = datetime(2026, 11, 27, tzinfo=UTC)
LARGE = 300_000


def buffer_of(*sizes: int) -> DeliveryBuffer:
    """A buffer in which copies with bodies of these sizes wait."""
    buffer = DeliveryBuffer("orders", "browser", ttl=None, filter=None, stays=True, window=1_000, alone=True)
    for seq, size in enumerate(sizes, 1):
        buffer.put(Copy(uuid4(), "orders_browser", seq, 1, NOW, NOW, 0.0, False, seq, uuid4(), b"x" * size))
    return buffer


def test_no_more_copies_come_while_a_megabyte_waits() -> None:
    assert buffer_of(*[LARGE] * 3).room == 997
    buffer = buffer_of(*[LARGE] * 4)
    assert (buffer.room, buffer.crowded) == (0, True)
    buffer.take(100)
    assert (buffer.room, buffer.crowded) == (996, False)


def test_at_most_a_megabyte_and_one_message_are_taken_at_once() -> None:
    buffer = buffer_of(*[LARGE] * 9)
    assert [len(buffer.take(100)) for _ in range(4)] == [4, 4, 1, 0]
    assert [len(buffer_of(2_000_000, 2_000_000).take(100)) for _ in range(2)] == [1, 1]
    assert len(buffer_of(*[10] * 500).take(100)) == 100


def test_a_large_body_is_not_kept_until_the_receiver_acknowledges_it() -> None:
    buffer = buffer_of(10, LARGE)
    small, large = buffer.take(2)
    assert (len(small.body), len(large.body)) == (10, LARGE)
    kept = [buffer.settled(copy.job) for copy in (small, large)]
    assert [copy is not None and (copy.seq, len(copy.body)) for copy in kept] == [(1, 10), (2, 0)]


def test_what_is_given_back_waits_no_more() -> None:
    buffer = buffer_of(*[LARGE] * 4)
    buffer.take(1)
    assert [copy.seq for copy in buffer.give_back()] == [1, 2, 3, 4]
    assert (buffer.room, buffer.crowded) == (1_000, False)
