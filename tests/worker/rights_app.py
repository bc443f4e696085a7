"""An application with work of every shape, for a worker whose role has the access worker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from penstock import Event, Job, Penstock, Settings
from penstock.worker import maintenance

maintenance.PRUNE_EVERY_S = 0.0
app = Penstock(settings=Settings(maintenance_interval=timedelta(milliseconds=100), shutdown_grace=timedelta(seconds=1)))
tenants = app.pool("tenants", slots=16)
orders = app.stream("orders", partitions=2)
news = app.topic("news")


@app.job("bill", keep_result=True)
async def bill(job: Job[Any]) -> None:
    """A job of a queue."""
    job.progress(1)


@app.job("fails", max_attempts=1)
async def fails(job: Job[Any]) -> None:
    """A job that fails."""
    raise ValueError("as it should")


@app.job("stepping", keep_result=True)
async def stepping(job: Job[Any]) -> Any:
    """A job with a durable step and a group of children."""
    await job.step("one", lambda: 1)
    return await job.gather("children", [bill.child({}), bill.child({})])


@tenants.job
async def of_tenant(job: Job[Any]) -> None:
    """A job of a pool."""


@orders.consumer(group="billing")
async def consume(event: Event[Any]) -> None:
    """Events of a stream."""


@news.subscriber("reader")
async def receive(job: Job[Any]) -> None:
    """Copies of messages."""


@app.timer(name="in-place", every=timedelta(seconds=1), as_job=False)
async def in_place() -> None:
    """A schedule that runs in the worker."""


@app.timer(name="as-job", every=timedelta(seconds=1))
async def as_job() -> None:
    """A schedule whose runs are jobs."""
