"""An order that is paid, waits for an approval, and is delivered: one handler, whose steps are done once whatever crashes.

    python -m examples.approval             approves the order
    python -m examples.approval --too-late  lets the time for the approval pass

The first attempt fails behind the payment, as if the printer were away: the second one does not pay again. While the order waits
it holds no place in a worker: stop the worker, and start it again when you like.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg

from penstock import Backoff, Job, JobRecord, Penstock, Retry

app = Penstock()
COOL_OFF = timedelta(seconds=0.2)
APPROVED_WITHIN = timedelta(seconds=2)
CREATE = (
    "create table if not exists payments (job uuid primary key, customer text not null, cents bigint not null, refunded boolean)"
)


@dataclass
class Order:
    """What a customer has ordered."""

    customer: str
    cents: int
    parcels: list[str]


@dataclass
class Approval:
    """Who approved an order."""

    by: str


@app.job("label", keep_result=True)
async def label(parcel: str) -> str:
    """Print the label of one parcel."""
    return f"label of {parcel}"


async def charge(connection: asyncpg.Connection[Any], job: UUID, order: Order) -> int:
    """Take the money, in the transaction that keeps the step: exactly once."""
    await connection.execute("insert into payments values ($1, $2, $3)", job, order.customer, order.cents)
    return order.cents


async def refund(job: UUID) -> None:
    """Give the money back. Harmless when it is repeated, since a crash may come before the step is kept."""
    await (await app.database()).fetch("update payments set refunded = true where job = $1", job)


@app.job("order", keep_result=True, backoff=Backoff(base=timedelta(milliseconds=50)))
async def order(job: Job[Order]) -> str:
    """One order, from the payment to the labels."""
    connection = await asyncpg.connect(app.database_url())
    try:
        async with connection.transaction():
            paid = await job.step("pay", charge, connection, job.id, job.data, connection=connection)
    finally:
        await connection.close()
    if job.attempt == 1:
        raise Retry("the printer is away")
    await job.sleep("cool off", COOL_OFF)
    try:
        approval = await job.wait_for("approved", Approval, timeout=APPROVED_WITHIN)
    except TimeoutError:
        await job.step("refund", refund, job.id)
        return f"no approval came in time: {paid} cents go back"
    labels = await job.gather("labels", [label.child(parcel) for parcel in job.data.parcels])
    return f"approved by {approval.by}: {', '.join(labels)}"


async def show(record: JobRecord) -> None:
    """Print what became of an order, and what it did."""
    print(f"{record.status} in attempt {record.attempt}: {record.result}")
    for step in await app.steps(record.id):
        print(f"  {step.kind:6} {step.name}: {'timed out' if step.timed_out else step.result}")
    (row,) = await (await app.database()).fetch("select count(*) as payments from payments where job = $1", record.id)
    print(f"  {row['payments']} payment")


async def main(approves: bool) -> None:
    """Run one order with a worker in this process; usually that is `penstock worker` with this app."""
    async with app:
        await (await app.database()).fetch(CREATE)
        worker = await app.worker()
        working = asyncio.create_task(worker.run())
        await worker.started()
        try:
            receipt = await order.enqueue(Order("ada@example.com", 4_200, ["front", "back"]))
            if approves:
                # In an application that is a request, days later.
                for by in ("grace@example.com", "alan@example.com"):
                    first = await app.signal(receipt.id, "approved", Approval(by))
                    print(f"{by} approves{'' if first else ', and is not the first'}")
            await show(await app.wait(receipt.id))
            if not approves and not await app.signal(receipt.id, "approved", Approval("grace@example.com")):
                print("the approval came too late")
        finally:
            worker.stop()
            await working


if __name__ == "__main__":
    asyncio.run(main("--too-late" not in sys.argv[1:]))
