"""The order service with Procrastinate."""

from datetime import UTC, datetime

from procrastinate import App, JobContext, PsycopgConnector, RetryStrategy

from examples.coming_from import shop

# A nightly run that no worker deferred at its time is deferred up to a day later.
app = App(connector=PsycopgConnector(conninfo=shop.database_url()), periodic_defaults={"max_delay": 86_400})


# -- a job with retries


@app.task(retry=RetryStrategy(max_attempts=4, exponential_wait=2))
def invoice(order_id: int, total: int) -> None:
    shop.charge(order_id, total)


# -- the orders of a customer, one after the other


@app.task(retry=RetryStrategy(max_attempts=4, exponential_wait=2))
def book(customer: str, order_id: int) -> None:
    with shop.connect() as connection:
        shop.book(connection, order_id)


# -- later, and each day


@app.task
def remind(order_id: int) -> None:
    shop.note("remind", order_id)


@app.periodic(cron="0 4 * * *")
@app.task
def close_the_day(timestamp: int) -> None:
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
        invoice.configure(connection=connection).defer(order_id=order_id, total=total)
        book.configure(connection=connection, lock=customer).defer(customer=customer, order_id=order_id)
        later = datetime.now(UTC) + shop.REMIND_AFTER
        remind.configure(connection=connection, schedule_at=later).defer(order_id=order_id)
        for receiver in RECEIVERS:
            receiver.configure(connection=connection).defer(order_id=order_id)


# -- the jobs of workers that died, which would stay as they are


@app.periodic(cron="* * * * *")
@app.task(queueing_lock="retry_stalled", pass_context=True)
async def retry_stalled(context: JobContext, timestamp: int) -> None:
    for job in await app.job_manager.get_stalled_jobs():
        await app.job_manager.retry_job(job)
