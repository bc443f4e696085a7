"""What the shop does in the background, one of each shape of work.

    job      send_confirmation   a mail for each order, enqueued in the transaction of the order
    pool     points              bonus points: the orders of a customer in order, one at a time
    stream   orders              the log of orders; the group `sales` adds it up, each order exactly once
    topic    shipped             a parcel left: a mail to the customer, and a look at the shelf
    cron     close_the_day       the takings, each night

`penstock worker examples.shop.work:app` runs all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from examples.shop.tables import Bonus, Mail, Order, Sale, Takings, session_on
from penstock import Batch, Fail, Job, Penstock, RateLimit, Tick

app = Penstock()


def session() -> AsyncSession:
    """A session on the database of the application, on the embedded server as on any other."""
    return session_on(app.database_url("asyncpg"))


@dataclass
class Placed:
    """An order that was placed."""

    order: int
    customer: str
    article: str
    cents: int


@dataclass
class Parcel:
    """An order that left the house."""

    order: int
    customer: str
    article: str


# -- a job


@app.job("send-confirmation", max_attempts=5, rate_limit=RateLimit(100, timedelta(seconds=1)))
async def send_confirmation(job: Job[int]) -> None:
    """Thank the customer for an order."""
    async with session() as database, database.begin():
        order = await database.get(Order, job.data)
        if order is None:
            raise Fail(f"no such order: {job.data}")  # no use to try again
        database.add(Mail(customer=order.customer, text=f"Thank you for order {order.id}: {order.article}"))


# -- a pool: the customer is the key

points = app.pool("points", payload=Placed)


@points.job
async def add_points(job: Job[Placed]) -> None:
    """A point for each full euro. No other handler writes this customer's ledger meanwhile, so the last balance stays valid."""
    async with session() as database, database.begin():
        if await database.scalar(select(Bonus).where(Bonus.order == job.data.order)):
            return  # written already, by a worker that died before it settled the job
        mine = select(Bonus.balance).where(Bonus.customer == job.data.customer)
        balance = await database.scalar(mine.order_by(Bonus.line.desc()).limit(1)) or 0
        earned = job.data.cents // 100
        database.add(Bonus(order=job.data.order, customer=job.data.customer, points=earned, balance=balance + earned))


# -- a stream, and a group that consumes it

orders = app.stream("orders", Placed, partitions=4, key="customer")


@orders.consumer(group="sales", max_batch_size=100)
async def add_up(batch: Batch[Placed]) -> None:
    """Count what each article brings in. The offset is committed with the sums, so that no order counts twice."""
    async with session() as database, database.begin():
        # In one order: partitions are worked in parallel, and none is to wait for one that waits for it.
        for placed in sorted(batch.records(), key=lambda placed: placed.article):
            one = insert(Sale).values(article=placed.article, orders=1, cents=placed.cents)
            more = {"orders": Sale.orders + 1, "cents": Sale.cents + one.excluded.cents}
            await database.execute(one.on_conflict_do_update(index_elements=[Sale.article], set_=more))
        await batch.commit(database)


# -- a topic with two subscribers

shipped = app.topic("shipped", Parcel)


@shipped.subscriber("mail")
async def tell_customer(job: Job[Parcel]) -> None:
    """Say that a parcel is on its way."""
    async with session() as database, database.begin():
        database.add(Mail(customer=job.data.customer, text=f"Order {job.data.order} is on its way: {job.data.article}"))


@shipped.subscriber("shelf")
async def mark_shipped(job: Job[Parcel]) -> None:
    """Take an order off the shelf."""
    async with session() as database, database.begin():
        order = await database.get_one(Order, job.data.order)
        order.shipped = True


# -- a cron schedule


@app.cron("0 0 * * *", tz="Europe/Berlin", missed="once")
async def close_the_day(tick: Tick) -> None:
    """Write down the takings up to now."""
    async with session() as database, database.begin():
        cents = await database.scalar(select(func.coalesce(func.sum(Sale.cents), 0)))
        await database.merge(Takings(day=tick.at.date(), cents=cents))  # a second run of the same night changes nothing
