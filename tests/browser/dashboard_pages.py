"""What the tests of the dashboard and the screenshots share: a browser, and a database with something to see on each page."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

from penstock import Event, JobFilter, NewJob, NotFound, Penstock
from penstock.http.user_queries import add_user
from penstock.http.users import hash_secret
from penstock.postgres.database import Database
from tests.debian import find
from tests.waiting import eventually

JOBS = 1_000
"""How many finished jobs there are of the type invoices."""
FAILED = UUID("0190b7a0-0000-7000-8000-0000000000f1")
"""One of them that failed."""
MESSAGE = UUID("0190b7a0-0000-7000-8000-0000000000f2")
"""A message of the topic news."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Debian's Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The tests may run as root, for whom Chromium's sandbox refuses to run.
        browser = playwright.chromium.launch(executable_path=find("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a thread, since Playwright has a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


def fill(url: str) -> None:
    """Put something to see on each page."""
    run(_fill(url))


async def _fill(url: str) -> None:
    async with Penstock(url) as app:
        database = await app.database()
        await add_user(database, "reader", "read", hash_secret("reader-password"), None)
        await add_user(database, "billing", "admin", hash_secret("billing-password"), ["invoices"])
        await app.create_job_type("invoices", max_attempts=3, concurrency=5)
        await app.create_job_type("mails", max_attempts=5)
        await app.create_job_type("rows", max_attempts=1)
        await app.create_pool("tenants", slots=64)
        await app.create_stream("orders", 2)
        await app.topic("news").declare()
        topic = await app.find_topic("news")
        await topic.subscribe("mobile")
        await topic.publish({"headline": "hello"}, id=MESSAGE)
        stream = await app.find_stream("orders")
        for number in range(20):
            await stream.append({"order": number}, key=f"customer-{number % 5}")
        await _consume(app)
        await app.enqueue_many("mails", [{"to": f"user{number}@example.com"} for number in range(40)])
        await app.enqueue_many("invoices", [{"customer": f"c{number}", "total": number} for number in range(5)])
        pool = await app.find_pool("tenants")
        for number in range(30):
            await pool.enqueue("acme" if number % 3 else "globex", {"n": number})
        await database.fetch(
            """
            insert into penstock.archived_jobs
                (id, finished_at, created_at, run_after, started_at, status, attempt, max_attempts, priority, name, worker, data,
                errors, signature)
            select
                case when n = 10 then $2::uuid else penstock.new_id() end, now() - n * interval '2 seconds',
                now() - interval '1 hour', now() - interval '1 hour',
                now() - (n + 1) * interval '2 seconds',
                case when n % 10 = 0 then 'failed' else 'succeeded' end::penstock.archived_job_status, 1, 3, 0, 'invoices',
                'web-1.4711.a1b2c3', jsonb_build_object('customer', 'c' || n % 7, 'total', n, 'iban', 'DE42'),
                case when n % 10 = 0 then jsonb_build_array(jsonb_build_object(
                    'type', case when n % 20 = 0 then 'ValueError' else 'TimeoutError' end,
                    'message',
                    case when n % 20 = 0 then 'no price for article ' || n else 'the bank did not answer within 30 s' end,
                    'traceback', 'Traceback (most recent call last):' || chr(10) || '  File "shop.py"',
                    'attempt', 1, 'worker', 'web-1.4711.a1b2c3', 'started_at', now() - (n + 1) * interval '2 seconds',
                    'failed_at', now() - n * interval '2 seconds'
                )) end,
                case when n % 10 = 0 then left(md5((n % 20)::text), 16) end
            from generate_series(1, $1::integer) as n
            """,
            JOBS,
            FAILED,
        )
        await database.fetch(
            "select penstock.declare_schedule('close-the-day', 'every', '3600', now() + interval '1 hour', 'in-place')"
        )
        group = await app.job_group("import-7", then="mails", on_failure="continue").open()
        await app.enqueue_many("rows", [NewJob({"row": number}, group=group) for number in range(12)])
        await settle(database, "rows", 7)
        await _start_run(app)
        await app.operations.start("purge", JobFilter(name="mails", key="no such key"))


async def _start_run(app: Penstock) -> None:
    """A run of which the first step has succeeded, and one of the jobs of the second has failed."""
    database = await app.database()
    for name in ("extract", "resize", "publish"):
        await app.create_job_type(name, max_attempts=1)
    extract, publish = app.job_type("extract"), app.job_type("publish")
    graph = app.workflow("nightly")
    first = graph.add(extract, {"day": "2026-01-11"}, step="extract")
    images = graph.add_many(
        app.job_type("resize", max_attempts=1), [{"image": number} for number in range(12)], after=first, step="images"
    )
    totals = graph.add(extract, {"of": "totals"}, after=first, step="totals")
    graph.add(publish, after=[images, totals], step="publish")
    graph.add(publish, after=first, step="announce")
    await graph.start(id="nightly-1")
    claimed = await database.fetch("select id, attempt, lease from penstock.claim('web-1.4711.a1b2c3', array['extract'], 1)")
    await database.fetch(
        "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array['succeeded'])",
        claimed[0]["id"], claimed[0]["attempt"], claimed[0]["lease"],
    )  # fmt: skip
    while await database.fetchval("select penstock.resolve_workflows()"):
        pass
    await settle(database, "resize", 5)
    await database.fetch("select penstock.claim('web-1.4711.a1b2c3', array['extract'], 1)")


async def _consume(app: Penstock) -> None:
    """Let one consumer group leave events to the dead letters, and another one stand before the first that it cannot handle."""
    orders = app.stream("orders", dict[str, int], partitions=2)

    @orders.consumer(group="mails", on_failure="dead-letter")
    async def mail(event: Event[dict[str, int]]) -> None:
        if event.data["order"] % 7 == 3:
            raise ValueError(f"order {event.data['order']} has no address")

    @orders.consumer(group="billing", on_failure="quarantine")
    async def bill(event: Event[dict[str, int]]) -> None:
        if event.data["order"] % 7 == 3:
            raise ValueError(f"order {event.data['order']} has no price")

    async def consumed() -> bool:
        # The groups are made when their consumers start.
        with suppress(NotFound):
            lags = [*await orders.lag("billing"), *await orders.lag("mails")]
            return all(lag.quarantined or not lag.lag for lag in lags) and any(lag.quarantined for lag in lags)
        return False

    worker = await app.worker("orders/billing", "orders/mails")
    working = asyncio.create_task(worker.run())
    try:
        await eventually(consumed, "the end of the consumers")
    finally:
        worker.stop()
        await working


async def settle(database: Database, name: str, number: int) -> None:
    """End jobs of a type: every third fails."""
    claimed = await database.fetch(
        "select id, attempt, lease from penstock.claim('web-1.4711.a1b2c3', array[$1], $2)", name, number
    )
    for place, job in enumerate(claimed):
        error = '{"type": "ValueError", "message": "the row has no price"}' if place % 3 == 0 else None
        await database.fetch(
            "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array[$4], array[$5::jsonb])",
            job["id"], job["attempt"], job["lease"], "failed" if error else "succeeded", error,
        )  # fmt: skip


def log_in(page: Any, base_url: str, user: str, secret: str) -> None:
    """Log in by the form."""
    page.goto(f"{base_url}/login")
    page.fill("input[name=user]", user)
    page.fill("input[name=secret]", secret)
    page.click("main button[type=submit]")
    page.wait_for_selector("text=Log out")


PAGES = {
    "overview": "", "jobs": "jobs?status=failed", "job": f"jobs/{FAILED}", "failures": "failures",
    "types": "types", "type": "types/invoices",
    "pools": "pools", "pool": "pools/tenants", "streams": "streams", "stream": "streams/orders",
    "events": "streams/orders/events", "dead-letters": "streams/orders/dead", "topics": "topics", "topic": "topics/news",
    "message": f"topics/news/messages/{MESSAGE}",
    "workflows": "workflows", "workflow": "workflows/import-7", "run": "workflows/nightly-1", "workers": "workers",
    "schedules": "schedules", "operations": "operations",
    "audit": "audit", "history": "history", "health": "health",
}  # fmt: skip
"""The pages of the dashboard, by the names of their screenshots."""
FORMS = (
    f"jobs/{FAILED}/edit", "types/invoices/enqueue", "streams/orders/groups/billing/seek?to=latest",
    "operations/new?kind=replay&type=invoices&status=failed", "operations/new?kind=set-priority&type=mails", "login",
)  # fmt: skip
"""Pages that ask something."""
