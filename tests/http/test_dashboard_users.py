"""What users of different rights see of one dashboard: none sees what was read for another."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.requests import Request

from penstock import Penstock
from penstock.http.auth import Principal, Role
from penstock.http.dashboard.mounting import create_dashboard
from penstock.http.dashboard.pages import PAGES
from penstock.http.dashboard.targets import find
from penstock.http.settings import HttpSettings
from tests.http.dashboard_browser import Reader, text_of
from tests.http.dashboard_server import JOB, reader
from tests.http.http_server import Served
from tests.waiting import eventually, until

USERS = {
    "one": Principal("one", Role.READ, frozenset(["mine", "mine-stream", "mine-pool", "mine-topic"])),
    "two": Principal("two", Role.ENQUEUE, frozenset(["mine", "theirs", "theirs-stream", "theirs-pool", "theirs-topic"])),
    "strict": Principal("strict", Role.ADMIN, frozenset(["theirs", "secret"])),
    "reader": Principal("reader", Role.READ),
    "admin": Principal("admin", Role.ADMIN),
}
ADDRESSES = [
    "/", "/jobs", "/jobs?status=unfinished", "/jobs?status=failed", "/jobs?type=mine", "/jobs?type=theirs", f"/jobs?id={JOB}",
    f"/jobs?type=mine&id={JOB}", f"/jobs?type=theirs&id={JOB}", f"/jobs/{JOB}", f"/jobs/{JOB}/edit", "/failures",
    "/failures?type=theirs", "/types", "/types/mine", "/types/theirs", "/types/theirs/enqueue", "/pools", "/pools/theirs-pool",
    "/pools/mine-pool?key=k", "/streams", "/streams/mine-stream", "/streams/theirs-stream", "/streams/theirs-stream/events",
    "/streams/mine-stream/dead", "/streams/mine-stream/groups/g/seek", "/topics", "/topics/mine-topic", "/topics/theirs-topic",
    "/topics/mine-topic/messages/{message}", "/workflows", "/workflows/g", "/workers", "/schedules", "/schedules/s",
    "/operations", "/operations/new?kind=replay&type=mine", "/operations/new?kind=replay&type=theirs", "/audit", "/history",
    "/health",
]  # fmt: skip


def test_every_page_is_opened() -> None:
    opened = {found.template.strip("/") for path in ADDRESSES if (found := find(path.partition("?")[0])[0]) is not None}
    assert opened == {page.path for page in PAGES}


async def identified(request: Request) -> Principal | None:
    return USERS.get(request.headers.get("x-user", ""))


def fresh(app: Penstock) -> httpx.AsyncClient:
    """A client of a new dashboard, which has read nothing."""
    settings = HttpSettings(dashboard_masked=("iban", "secret:*"))
    transport = httpx.ASGITransport(create_dashboard(app, identify=identified, settings=settings))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost/", timeout=60)


async def seen(client: httpx.AsyncClient, user: str, address: str) -> tuple[int, str]:
    """What a user is shown, without times and what passes with them."""
    answer = await client.get(address, headers={"x-user": user})
    content = re.search(r"<main.*</main>", answer.text, re.DOTALL)
    assert content is not None, answer.text
    text = re.sub(r"<time.*?</time>|<span data-read>.*?</span>|data-version=\"\w+\"", "", content[0], flags=re.DOTALL)
    return answer.status_code, re.sub(r"([\d.,]+ ?(s|ms|min|h|d|kB|MB)\b ?)+", "", text)


async def seen_alone(app: Penstock, user: str, addresses: list[str]) -> dict[str, tuple[int, str]]:
    """What a user is shown by a dashboard of which this is the only user."""
    async with fresh(app) as client:
        return {address: await seen(client, user, address) for address in addresses}


@pytest.fixture
async def app(dashboard: Served) -> AsyncIterator[Penstock]:
    async with Penstock(dashboard.database_url) as app:
        yield app


@pytest.mark.parametrize("order", [list(USERS), list(reversed(USERS))], ids=["narrow first", "admin first"])
async def test_a_user_sees_the_same_whichever_user_looked_before(app: Penstock, order: list[str]) -> None:
    message = (await (await app.find_topic("mine-topic")).publish({"text": "mine"})).id
    addresses = [address.format(message=message) for address in ADDRESSES]
    alone = {user: await seen_alone(app, user, addresses) for user in USERS}
    shared: dict[str, dict[str, tuple[int, str]]] = {user: {} for user in USERS}
    async with fresh(app) as client:
        for address in addresses:
            for user in order:
                shared[user][address] = await seen(client, user, address)
    for user in USERS:
        changed = [address for address in addresses if shared[user][address] != alone[user][address]]
        # As time passes some pages change for everybody: a job has waited for long by now. Then what is new is what the user,
        # alone again, sees now.
        now = await seen_alone(app, user, changed)
        for address in changed:
            status, text = shared[user][address]
            before, after = alone[user][address], now[address]
            lines = {*before[1].splitlines(), *after[1].splitlines()}
            assert (user, address, status) in [(user, address, before[0]), (user, address, after[0])]
            assert (user, address, [line for line in text.splitlines() if line not in lines]) == (user, address, [])
    # The walk tells the users apart.
    assert "Traceback of theirs" in alone["admin"][f"/jobs/{JOB}"][1]
    assert alone["one"][f"/jobs/{JOB}"][0] == 404
    assert "no order" in alone["two"][f"/jobs?type=mine&id={JOB}"][1]
    assert "no order" not in alone["one"][f"/jobs?type=mine&id={JOB}"][1]


async def test_a_user_of_some_types_sees_no_worker_that_works_for_others_too(dashboard: Served, app: Penstock) -> None:
    database = await app.database()
    for id, names in (("of-mine", ["mine"]), ("of-both", ["mine", "theirs"]), ("of-any", [])):
        await database.fetch(
            """
            insert into penstock.workers
                (id, host, pid, names, concurrency, started_at, seen_at, dead_after, blocked_since, blocked_by)
            values ($1, 'host-of-' || $1, 1, $2, 1, now(), now(), '1 day', now() - interval '1 hour', 'mine 0190b7a0')
            """,
            id,
            names,
        )  # fmt: skip
    try:
        with reader(dashboard, "narrow") as narrow:
            told = {
                one["id"]
                for one in narrow.client.get("/v1/workers", auth=("narrow", "narrow-password")).raise_for_status().json()
            }
            assert told == {"shared", "of-mine"}
            # The page of a moment ago may have been read for another user, before there were these workers.
            await eventually(
                lambda: set(re.findall(r'<tr data-row="([^"]+)">', narrow.get("workers").text)) == told, "the workers of the user"
            )
            for page in ("workers", "", "types/mine"):
                text = narrow.get(page).text
                assert "of-both" not in text and "of-any" not in text, page
    finally:
        await database.fetch("delete from penstock.workers where id like 'of-%'")


async def test_the_loads_and_rates_of_types_beyond_a_thousand_are_shown(url: str) -> None:
    async with Penstock(url) as app:
        database = await app.database()
        await database.fetch(
            "select penstock.create_job_type(format('t-%s', lpad(n::text, 4, '0'))) from generate_series(1, 1100) as n"
        )
        await database.fetch(
            """
            select count(*)
            from penstock.jobs as type
            cross join lateral penstock.enqueue_many(type.name, array['{}'::jsonb, '{}'::jsonb]) as enqueued
            """
        )
        await database.fetch(
            """
            insert into penstock.rates (name, wide, at, succeeded, failed, retried, others, waits, runs, wait_s, run_s)
            select name, true, date_trunc('hour', penstock.clock()), 77, 0, 0, 0, buckets, buckets, 0, 0
            from penstock.jobs
            cross join (select array_fill(0.0::double precision, array[19]) as buckets) as made
            """
        )
        async with fresh(app) as client:
            for after in ("t-0000", "t-1050"):
                page = (await client.get(f"/types?after={after}", headers={"x-user": "admin"})).text
                rows = re.findall(r'<tr data-row="(t-\d+)">(.*?)</tr>', page, re.DOTALL)
                assert len(rows) == 50
                for name, row in rows:
                    words = re.sub(r"<[^>]+>", " ", row).split()
                    assert "2" in words and "77" in words, (name, words)
        assert (await app.overview()).ready == 2_200


def test_the_page_of_a_type_says_how_many_workers_work_on_it(admin: Reader) -> None:
    until(lambda: "Workers 1 " in text_of(admin.get("types/mine").text), "the one worker")
