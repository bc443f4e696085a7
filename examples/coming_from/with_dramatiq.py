"""The order service with Dramatiq, on Redis."""

import os

import dramatiq

from examples.coming_from import shop

if os.environ.get("ORDERS_TESTING"):
    from dramatiq.brokers.stub import StubBroker

    dramatiq.set_broker(StubBroker())
else:
    from dramatiq.brokers.redis import RedisBroker

    dramatiq.set_broker(RedisBroker(url="redis://localhost"))


# -- a job with retries


@dramatiq.actor(max_retries=4, min_backoff=1_000)
def invoice(order_id: int, total: int) -> None:
    shop.charge(order_id, total)


# -- the orders of a customer, one after the other


@dramatiq.actor(max_retries=4, min_backoff=1_000)
def book(customer: str) -> None:
    # Messages have no order: whichever message gets the lock books everything that the customer has ordered up to now.
    with shop.connect() as connection:
        connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (customer,))
        for order_id in shop.unbooked(connection, customer):
            shop.book(connection, order_id)


# -- later, and each day


@dramatiq.actor
def remind(order_id: int) -> None:
    shop.note("remind", order_id)


# Dramatiq has no scheduler. This one is cron's:
# 0 4 * * * python -c "from examples.coming_from.with_dramatiq import close_the_day; close_the_day.send()"
@dramatiq.actor
def close_the_day() -> None:
    shop.note("close-the-day")


# -- two receivers


@dramatiq.actor
def reserve(order_id: int) -> None:
    shop.note("reserve", order_id)


@dramatiq.actor
def thank(order_id: int) -> None:
    shop.note("thank", order_id)


RECEIVERS = [reserve, thank]

# -- an order


def place(order_id: int, customer: str, total: int) -> None:
    with shop.connect() as connection:
        shop.insert_order(connection, order_id, customer, total)
    # The order is committed. A process that dies here, or a broker that does not answer, leaves it without its messages.
    invoice.send(order_id, total)
    book.send(customer)
    remind.send_with_options(args=(order_id,), delay=shop.REMIND_AFTER)
    dramatiq.group(receiver.message(order_id) for receiver in RECEIVERS).run()
