"""The orders that each program works off in its test, and what has to have happened in the end."""

from __future__ import annotations

import time

from examples.coming_from import shop

ORDERS = [(1, "ada", 500), (2, "ada", 700), (3, "ada", 200), (4, "bob", 900)]
"""The number of each order, its customer and its total."""
WORK = {"invoice": 4, "book": 4, "remind": 4, "reserve": 4, "thank": 4, "close-the-day": 1}
"""How often each work is to be done."""


def refuse_some_work() -> None:
    """Let the first invoice, and the second order of a customer who has three, fail when they are tried for the first time."""
    shop.refuse_once("invoice", 1)
    shop.refuse_once("book", 2)


def wait_until_done(timeout: float = 60) -> None:
    """Wait until all work is done.

    Raises:
        TimeoutError: It is not; the message says how far it came.
    """
    deadline = time.monotonic() + timeout
    while (done := {what: len(shop.journal(what)) for what in WORK}) != WORK:
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout:.0f} s this is done: {done}")
        time.sleep(0.05)


def check() -> None:
    """Everything was done once, with retries, and the orders of a customer one after the other."""
    done = {what: shop.journal(what) for what in WORK}
    assert {what: len(orders) for what, orders in done.items()} == WORK, done
    assert shop.refusals() == 0, "the work that was refused is to have been tried"
    for what in ("invoice", "book", "remind", "reserve", "thank"):
        assert set(done[what]) == {1, 2, 3, 4}, done
    assert [order for order in done["book"] if order != 4] == [1, 2, 3], f"the ledger has the order {done['book']}"
