"""Every way to declare and to call, as type checkers see it. A line with `# wrong` must be refused, and no other line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BaseModel

from penstock import (
    Backoff,
    Batch,
    Depends,
    Event,
    Events,
    Job,
    Leader,
    LeaderTask,
    NewEvent,
    NewJob,
    NewMessage,
    OnFailure,
    Penstock,
    RateLimit,
    Retention,
    Schedule,
    Standing,
    Tick,
    inject,
)

app = Penstock("postgresql://localhost/shop")


class Shipment(BaseModel):
    id: str


@dataclass
class Label:
    text: str


class Session: ...


async def get_session() -> AsyncIterator[Session]:
    yield Session()


def get_number() -> int:
    return 1


def get_label() -> Iterator[Label]:
    yield Label("fragile")


@app.job
async def resize(path: str, width: int = 100) -> None: ...


@app.job("ship", max_attempts=3, rate_limit=RateLimit(10, timedelta(seconds=1)), key="id")
async def ship(shipment: Shipment) -> None: ...


@app.job(executor="process")
def render(job: Job[Label]) -> None: ...


@app.job(keep_result=True)
async def bill(job: Job[Shipment], session: Annotated[Session, Depends(get_session)]) -> str:
    return job.data.id


@app.job
@inject(get_session)
@inject(get_number)
async def archive(number: int, session: Session, path: str) -> None: ...


@app.job
@inject(get_label)
def print_label(label: Label, copies: int) -> None: ...


@app.job
async def clean() -> None: ...


@app.job(max_batch_size=10)
async def index(jobs: list[Job[int]], session: Annotated[Session, Depends(get_session)]) -> list[int | Exception]:
    return [job.data for job in jobs]


@app.job(
    "pay", encrypted=True, max_waiting=10_000, backoff=Backoff(base=timedelta(seconds=2)), docs_url="https://a.b", owner="us"
)
async def pay(job: Job[Shipment]) -> None:
    await job.finish(object(), result={"paid": job.data.id})


remote = app.job_type("remote", Shipment, max_attempts=2)
untyped = app.job_type("untyped")

bolts = app.pool("bolts", key="tenant", concurrency=5)


@bolts.job
async def tighten(tenant: str, turns: int) -> None: ...


cells = app.pool("cells", int)
parcels = app.job_type("parcels", Shipment, key=lambda shipment: shipment.id)
crates = app.pool("crates", Shipment, key=lambda shipment: shipment.id)
mixed = app.pool("mixed", Shipment | Label, key=lambda item: item.id if isinstance(item, Shipment) else item.text)


@cells.job(executor="thread" if False else "auto")
async def cell(job: Job[int]) -> None: ...


ledger = app.pool("ledger", Shipment, encrypted=True, on_retry="skip", key_max_waiting=100, prefetch_per_key=1)


@ledger.standing(payload=Shipment)
async def tenant(job: Standing[Shipment]) -> AsyncIterator[None]:
    assert job.data.id
    yield


delays = app.topic("delays", Label)
sealed = app.topic("sealed", Label, catch_up=3, encrypted=True)
keyed = app.topic("keyed", Label, key=lambda label: label.text)
loose = app.topic("loose", key=lambda label: label["text"])
clicks = app.stream("clicks", bytes, compression="zstd", compact=True, encrypted=True, keep=Retention(age=timedelta(days=1)))


@delays.subscriber("jfk", max_attempts=2)
async def at_jfk(job: Job[Label]) -> None: ...


@keyed.subscriber("all", max_batch_size=10, linger=timedelta(seconds=1), batch_by_key=True)
async def on_labels(jobs: list[Job[Label]]) -> None: ...


@delays.subscriber("lga")
async def at_lga(text: str) -> None: ...


orders = app.stream("orders", Shipment, partitions=4, key="id", keep=timedelta(days=1), segment_events=10)


tracked = app.stream("tracked", Shipment, key=lambda shipment: shipment.id)


@orders.consumer(group="billing")
async def on_order(event: Event[Shipment], session: Annotated[Session, Depends(get_session)]) -> None:
    assert event.data.id


@orders.consumer(group="audit", max_batch_size=100)
def on_orders(batch: Batch[Shipment]) -> None: ...


@orders.consumer(group="scan")
async def scan(events: Events[Shipment]) -> None: ...


@app.cron("0 4 * * *", max_attempts=2)
async def report(tick: Tick) -> None: ...


@app.cron("0 4 1 * *", key=lambda tick: f"{tick.at:%Y-%m}")
async def monthly(tick: Tick) -> None: ...


@app.timer(every=timedelta(minutes=1))
def tick() -> None: ...


@app.timer(every=timedelta(minutes=1), name="sealed-report", encrypted=True, missed="once")
async def sealed_report(job: Job[Tick]) -> None: ...


@app.on_leader
async def follow_prices(leader: Leader) -> None: ...


@app.on_leader(name="prices", owner="us")
async def follow_other_prices() -> None: ...


@app.on_startup
async def warm_up() -> None: ...


@orders.consumer(group="dead", on_failure=OnFailure(max_attempts=3, then="dead-letter"), concurrency=2)
def on_order_in_thread(event: Event[Shipment]) -> None: ...


@app.lifespan
async def clients() -> AsyncIterator[list[int]]:
    yield [1]


@app.middleware
async def timed(work: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
    return await call_next(work)


async def right() -> None:
    await resize.enqueue("a.png", width=300)
    await resize.options(key="u1", priority=1, run_after=timedelta(seconds=1)).enqueue(path="a.png")
    await ship.enqueue(Shipment(id="shp_1"))
    await ship.enqueue(shipment=Shipment(id="shp_1"))
    await render.enqueue(Label("fragile"))
    await bill.enqueue(Shipment(id="shp_1"))
    await archive.enqueue("a.png")
    await archive.options(connection=object()).enqueue(path="a.png")
    await print_label.enqueue(copies=2)
    await clean.enqueue()
    await index.enqueue(3)
    await remote.enqueue(Shipment(id="shp_1"))
    await untyped.enqueue({"any": "thing"})
    await tighten.options(key="acme").enqueue("acme", turns=3)
    await bolts.enqueue("acme", {"tenant": "acme", "turns": 1})
    await cell.options(key="a").enqueue(3)
    await at_jfk.enqueue(Label("late"))
    await delays.publish(Label("late"))
    await delays.publish(Label("late"), key="UA123")
    await delays.publish_many([NewMessage(Label("late"), key="UA123")])
    await on_labels.enqueue(Label("late"))
    await parcels.enqueue(Shipment(id="shp_1"))
    await app.run_schedule("monthly", key="2026-01")
    await report.declare()
    await follow_prices.declare()
    await orders.append(Shipment(id="shp_1"))
    await resize.options(unique="u", unique_for=timedelta(minutes=5), max_attempts=1, time_limit=timedelta(seconds=1)).enqueue(
        "a"
    )
    await pay.enqueue(Shipment(id="shp_1"))
    await app.enqueue("pay", Shipment(id="shp_1"), key="acme")
    await app.enqueue_many("pay", [NewJob(Shipment(id="shp_1"), key="acme")])
    await ledger.start("acme", Shipment(id="shp_1"), replace=True, timeout=timedelta(seconds=1))
    await ledger.reconcile({"acme": Shipment(id="shp_1")})
    await sealed.publish_many([Label("late"), NewMessage(Label("later"), unique="u")])
    await clicks.append_many([b"click", NewEvent(b"click", key="acme")])
    await clicks.producer("importer").append(b"click")
    async with orders.consume("reports", idle_timeout=timedelta(seconds=1)) as batches:
        async for batch in batches:
            ids: list[str] = [shipment.id for shipment in batch.records()]
            assert ids
    async with orders.tail("latest") as reader:
        first: Shipment = (await anext(reader)).data
        assert first
    schedules: list[Schedule] = [report, sealed_report]
    leading: list[LeaderTask] = [follow_prices, follow_other_prices]
    assert schedules and leading
    await resize.enqueue_many([resize.new("a.png"), resize.options(key="b").new("b.png")])
    resize.sync.enqueue("a.png")
    resize.sync.options(key="u1").enqueue("a.png", width=1)
    numbers: list[int] = clients()
    assert numbers
    await app.run_worker("resize")


async def wrong() -> None:
    await resize.enqueue(3)  # wrong
    await resize.enqueue("a.png", widht=3)  # wrong
    await resize.enqueue("a.png", key="u1")  # wrong
    await resize.enqueue()  # wrong
    await resize.options(prioriti=3).enqueue("a.png")  # wrong
    await ship.enqueue(Label("no"))  # wrong
    await ship.options(key=3).enqueue(Shipment(id="shp_1"))  # wrong
    await render.enqueue(Shipment(id="shp_1"))  # wrong
    await bill.enqueue(Shipment(id="shp_1"), Session())  # wrong
    await archive.enqueue(Session(), "a.png")  # wrong
    await archive.enqueue(path="a.png", number=3)  # wrong
    await print_label.enqueue(copies="two")  # wrong
    await clean.enqueue("now")  # wrong
    await index.enqueue([3])  # wrong
    await remote.enqueue("shp_1")  # wrong
    await tighten.enqueue("acme", turns="three")  # wrong
    await cell.enqueue("three")  # wrong
    await orders.append(Label("no"))  # wrong
    resize.sync.enqueue(3)  # wrong
    resize.sync.options(key="u1").enqueue(width=1)  # wrong
    app.job("x", retries=3)  # wrong
    app.pool("x", slots="many")  # wrong
    app.stream("x", partition=3)  # wrong
    app.cron("0 4 * * *", max_attempts="two")  # wrong
    app.timer(every=60)  # wrong
    app.topic("x", encrypted="yes")  # wrong
    app.stream("x", encrypted="yes")  # wrong
    app.pool("x", on_retry="drop")  # wrong
    app.job("x", encrypted=1)  # wrong
    app.job("x", max_batch_size="many")  # wrong
    app.on_leader(every=3)  # wrong
    delays.subscriber("x", retries=3)  # wrong
    orders.consumer(grp="x")  # wrong
    orders.consumer(group="x", on_failure="drop")  # wrong
    await pay.enqueue(Label("no"))  # wrong
    await resize.options(unique_for=5).enqueue("a.png")  # wrong
    await sealed.publish(Shipment(id="no"))  # wrong
    await clicks.append("no bytes")  # wrong
    await orders.append_many([Label("no")])  # wrong
    await ledger.enqueue("acme", Label("no"))  # wrong
    app.job_type("x", Shipment, key=lambda shipment: shipment.customer)  # wrong
    app.pool("x", Shipment, key=lambda shipment: shipment.customer)  # wrong
    app.topic("x", Shipment, key=lambda shipment: shipment.customer)  # wrong
    app.stream("x", Shipment, key=lambda shipment: shipment.customer)  # wrong
    app.topic("x", Shipment, key=lambda shipment: 3)  # wrong
    app.pool("x", Shipment, key=lambda: "a")  # wrong
    app.topic("x", keep=3)  # wrong
    app.cron("0 4 * * *", key=lambda tick: tick.customer)  # wrong
    await delays.publish(Label("late"), key=3)  # wrong


asyncio.run(right())
