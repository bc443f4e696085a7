"""The order service with Celery, on Redis."""

from celery import Celery, group
from celery.schedules import crontab

from examples.coming_from import shop

app = Celery("orders", broker="redis://localhost")
# A task is acknowledged when it has ended, so that the task of a worker that dies runs again.
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
# Longer than any countdown: Redis delivers a task again that is not acknowledged after this time.
app.conf.broker_transport_options = {"visibility_timeout": 4 * 86_400}
app.conf.timezone = "Europe/Berlin"
app.conf.beat_schedule = {"close-the-day": {"task": "close_the_day", "schedule": crontab(hour=4, minute=0)}}


# -- a job with retries


@app.task(autoretry_for=(Exception,), retry_backoff=True, max_retries=4)
def invoice(order_id: int, total: int) -> None:
    shop.charge(order_id, total)


# -- the orders of a customer, one after the other


@app.task(autoretry_for=(Exception,), retry_backoff=True, max_retries=4)
def book(customer: str) -> None:
    # Tasks have no order: whichever task gets the lock books everything that the customer has ordered up to now.
    with shop.connect() as connection:
        connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (customer,))
        for order_id in shop.unbooked(connection, customer):
            shop.book(connection, order_id)


# -- later, and each day


@app.task
def remind(order_id: int) -> None:
    shop.note("remind", order_id)


@app.task(name="close_the_day")
def close_the_day() -> None:
    shop.note("close-the-day")


# -- two receivers


@app.task
def reserve(order_id: int) -> None:
    shop.note("reserve", order_id)


@app.task
def thank(order_id: int) -> None:
    shop.note("thank", order_id)


RECEIVERS = [reserve, thank]

# -- an order


def place(order_id: int, customer: str, total: int) -> None:
    with shop.connect() as connection:
        shop.insert_order(connection, order_id, customer, total)
    # The order is committed. A process that dies here, or a broker that does not answer, leaves it without its tasks.
    invoice.delay(order_id, total)
    book.delay(customer)
    remind.apply_async((order_id,), countdown=shop.REMIND_AFTER.total_seconds())
    group(receiver.s(order_id) for receiver in RECEIVERS).delay()
