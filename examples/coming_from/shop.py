"""The order service without its background work: its tables, and what each job does to them. The four programs share it."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

REMIND_AFTER = timedelta(days=3)
"""How long after its order a reminder goes out."""


class Refused(Exception):
    """A service that a job needs was busy."""


def database_url() -> str:
    """The database of the orders."""
    return os.environ.get("ORDERS_DATABASE_URL", "postgresql://localhost/orders")


def connect() -> psycopg.Connection[Any]:
    """A connection for a `with` block, which is one transaction."""
    return psycopg.connect(database_url())


def create_tables() -> None:
    """Create the tables of the service."""
    with connect() as connection:
        connection.execute(Path(__file__).with_name("shop.sql").read_text("utf-8"))


def insert_order(connection: psycopg.Connection[Any], order_id: int, customer: str, total: int) -> None:
    """Write an order, in the transaction of the caller."""
    connection.execute("insert into orders values (%s, %s, %s)", (order_id, customer, total))


def charge(order_id: int, total: int) -> None:
    """Send an invoice.

    Raises:
        Refused: The payment provider is busy.
    """
    note("invoice", order_id)


def book(connection: psycopg.Connection[Any], order_id: int) -> None:
    """Write an order into the ledger of its customer, in the transaction of the caller.

    Raises:
        Refused: The ledger is being closed.
    """
    _refuse("book", order_id)
    _write(connection, "book", order_id)


def unbooked(connection: psycopg.Connection[Any], customer: str) -> list[int]:
    """The orders of a customer that are not in the ledger, in their order."""
    found = connection.execute(
        "select id from orders where customer = %s and id not in (select order_id from journal where what = 'book') order by id",
        (customer,),
    )
    return [row[0] for row in found]


def note(what: str, order_id: int | None = None) -> None:
    """Write a line into the journal, in a transaction of its own. The same line is written once.

    Raises:
        Refused: The work is refused the first time.
    """
    _refuse(what, order_id)
    with connect() as connection:
        _write(connection, what, order_id)


def journal(what: str) -> list[int | None]:
    """The orders for which something was done, in the order in which it was."""
    with connect() as connection:
        return [row[0] for row in connection.execute("select order_id from journal where what = %s order by line", (what,))]


def refuse_once(what: str, order_id: int) -> None:
    """Let work for an order fail when it is tried for the first time."""
    with connect() as connection:
        connection.execute("insert into refusals values (%s, %s)", (what, order_id))


def refusals() -> int:
    """How much of the work has yet to fail."""
    with connect() as connection:
        return len(connection.execute("select from refusals").fetchall())


def _write(connection: psycopg.Connection[Any], what: str, order_id: int | None) -> None:
    connection.execute("insert into journal (what, order_id) values (%s, %s) on conflict do nothing", (what, order_id))


def _refuse(what: str, order_id: int | None) -> None:
    with connect() as connection:
        refused = connection.execute("delete from refusals where what = %s and order_id = %s", (what, order_id)).rowcount
    if refused:
        raise Refused(f"{what} of order {order_id} is refused")
