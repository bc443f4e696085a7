"""The shop, tested as any application of Penstock can be: jobs in the test's own process, everything else with a worker in it."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta

import pytest
from httpx import AsyncClient
from sqlalchemy import select

from examples.shop.tables import Bonus, Mail, Order, Sale, Takings
from examples.shop.work import app, close_the_day, orders, session
from penstock import Status, Tick
from penstock.testing import consumed, run_due_jobs, running_worker


async def place(browser: AsyncClient, customer: str, cents: int = 1250, article: str = "tea") -> int:
    """Place an order; returns its number."""
    answer = await browser.post("/orders", json={"customer": customer, "article": article, "cents": cents})
    assert answer.status_code == 201, answer.text
    return int(answer.json()["order"])


async def test_the_first_order_on_a_fresh_database_brings_a_mail(browser: AsyncClient) -> None:
    number = await place(browser, "ada")
    ran = await run_due_jobs(app, "send-confirmation")
    assert [(job.status, job.key, job.data) for job in ran] == [(Status.SUCCEEDED, "ada", number)]
    async with session() as database:
        [mail] = await database.scalars(select(Mail))
        assert mail.text == f"Thank you for order {number}: tea"


async def test_an_order_that_fails_leaves_no_work(browser: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the disk of the log is full")

    monkeypatch.setattr(orders, "append", fail)  # the last step of the transaction
    with pytest.raises(RuntimeError):
        await place(browser, "ada")
    assert await run_due_jobs(app) == []
    async with session() as database:
        assert (await database.scalars(select(Order))).all() == []


async def test_a_confirmation_of_no_order_fails_for_good(browser: AsyncClient) -> None:
    receipt = await app.enqueue("send-confirmation", 404)
    await run_due_jobs(app)
    job = await app.find(receipt.id)
    assert (job.status, len(job.errors)) == (Status.FAILED, 1)


async def test_points_are_added_in_the_order_of_the_orders(browser: AsyncClient) -> None:
    for cents in (1000, 250, 399):
        await place(browser, "ada", cents)
    await place(browser, "bob", 700)
    await run_due_jobs(app, "points")
    async with session() as database:
        ledger = await database.scalars(select(Bonus).where(Bonus.customer == "ada").order_by(Bonus.line))
        assert [(line.points, line.balance) for line in ledger] == [(10, 10), (2, 12), (3, 15)]
    assert (await browser.get("/customers/bob")).json() == {"points": 7}


async def test_sales_count_each_order_once(browser: AsyncClient) -> None:
    await asyncio.gather(*(place(browser, f"customer-{n % 7}", 100 + n, "tea" if n % 2 else "cake") for n in range(30)))
    async with running_worker(app):
        await consumed(orders, "sales")
    async with session() as database:
        sales = {sale.article: (sale.orders, sale.cents) for sale in await database.scalars(select(Sale))}
    assert sales == {"tea": (15, sum(range(101, 130, 2))), "cake": (15, sum(range(100, 130, 2)))}


async def test_shipping_tells_every_subscriber_once(browser: AsyncClient) -> None:
    number = await place(browser, "ada")
    for _ in range(2):
        assert (await browser.post(f"/orders/{number}/ship")).json() == {"subscribers": 2}
    ran = await run_due_jobs(app, "shipped_mail", "shipped_shelf")
    assert sorted(job.name for job in ran) == ["shipped_mail", "shipped_shelf"]
    async with session() as database:
        assert (await database.get_one(Order, number)).shipped
    assert (await browser.post("/orders/12345/ship")).status_code == 404


async def test_the_day_is_closed_at_midnight(browser: AsyncClient) -> None:
    async with session() as database, database.begin():
        database.add(Sale(article="tea", orders=2, cents=800))
    # A schedule's function is a function: no test waits for midnight.
    tick = Tick("close-the-day", datetime(2026, 3, 1, tzinfo=UTC), timedelta(0))
    await close_the_day(tick)
    await close_the_day(tick)
    async with session() as database:
        assert [(day.day, day.cents) for day in await database.scalars(select(Takings))] == [(date(2026, 3, 1), 800)]
