"""The order service with Penstock."""

from datetime import timedelta

from examples.coming_from import shop
from penstock import Backoff, Penstock

app = Penstock(shop.database_url())


# -- a job with retries


@app.job(max_attempts=5, backoff=Backoff(base=timedelta(seconds=1)))
def invoice(order_id: int, total: int) -> None:
    shop.charge(order_id, total)


# -- the orders of a customer, one after the other

ledger = app.pool("ledger", key="customer", max_attempts=5)


@ledger.job
def book(customer: str, order_id: int) -> None:
    with shop.connect() as connection:
        shop.book(connection, order_id)


# -- later, and each day


@app.job
def remind(order_id: int) -> None:
    shop.note("remind", order_id)


@app.cron("0 4 * * *", tz="Europe/Berlin", missed="once")
def close_the_day() -> None:
    shop.note("close-the-day")


# -- two receivers

placed = app.topic("placed")


@placed.subscriber("stock")
def reserve(order_id: int) -> None:
    shop.note("reserve", order_id)


@placed.subscriber("mail")
def thank(order_id: int) -> None:
    shop.note("thank", order_id)


# -- an order


def place(order_id: int, customer: str, total: int) -> None:
    with shop.connect() as connection:
        shop.insert_order(connection, order_id, customer, total)
        invoice.sync.options(connection=connection).enqueue(order_id, total)
        book.sync.options(connection=connection).enqueue(customer, order_id)
        remind.sync.options(connection=connection, run_after=shop.REMIND_AFTER).enqueue(order_id)
        placed.sync.publish({"order_id": order_id}, connection=connection)
