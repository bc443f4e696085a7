"""Each statement of a page of the dashboard looks at a bounded part of a database with a million finished and waiting jobs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, TypeVarTuple

import asyncpg
import pytest

from penstock import Penstock
from penstock.http.auth import Principal, Role
from penstock.http.dashboard.pages import PAGES
from penstock.http.dashboard.poller import Poller
from penstock.http.dashboard.targets import find
from penstock.http.dashboard.view import View
from penstock.http.masking import Masking
from penstock.postgres.database import Database

Sql = asyncpg.Connection
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
JOBS = 1_000_000
# A page of 8 KiB has about 25 finished or 10 waiting jobs: to look at all would be 40,000 and 100,000 pages.
MOST_BLOCKS = 8_000
OPENED = [
    "/", "/jobs", "/jobs?status=unfinished", "/jobs?status=failed", "/jobs?status=queued&type=a", "/jobs?type=a&key=k3",
    "/jobs?status=waiting", "/jobs?status=failed&group={group}",
    "/jobs?type=a&field=data.customer=nobody", "/jobs?error=no%20such", "/jobs/{id}", "/jobs/{id}/edit", "/failures",
    "/failures?type=a", "/types", "/types/a", "/types/a/enqueue", "/pools", "/pools/p", "/streams", "/streams/s",
    "/streams/s/dead", "/streams/s/events", "/streams/s/groups/g/seek", "/topics", "/topics/t", "/topics/t/messages/{message}",
    "/workers",
    "/schedules", "/workflows", "/workflows?open=yes", "/workflows/{group}", "/operations", "/audit", "/history",
]  # fmt: skip
# Doctor has bounds and a connection of its own; the preview of an operation counts, and ends after two seconds; a schedule's page
# reads its last runs by an index.
NOT_OPENED = {"health", "operations/new", "schedules/{name}"}


class Recorder(Database):
    """Keeps each statement with its arguments."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: dict[str, tuple[Any, ...]] = {}

    async def fetch(self, query: str, *args: Any, retry: bool = False, timeout: float | None = None) -> list[Any]:
        rows = await super().fetch(query, *args, retry=retry, timeout=timeout)
        # What the database refused looks at nothing.
        self.seen[query] = args
        return rows


class Recording(View):
    """A view that reads through a recorder, and keeps nothing."""

    recorder: Recorder

    async def read(self, call: Callable[[Database, *Arguments], Awaitable[T]], *arguments: *Arguments, **_: Any) -> T:
        return await call(self.recorder, *arguments)


@pytest.fixture
async def recorder(app: Penstock, url: str) -> AsyncIterator[Recorder]:
    recorder = Recorder(url, app.settings, "test")
    await recorder.open()
    yield recorder
    await recorder.close()


async def fill(app: Penstock, sql: Sql, jobs: int) -> None:
    for name in ("a", "b"):
        await app.create_job_type(name)
    await app.create_pool("p", slots=4)
    await app.create_stream("s", 2)
    await app.create_stream("s.dead", 1)
    await app.topic("t").declare()
    await sql.execute("select penstock.declare_consumer_group('s', 'g')")
    await sql.execute("alter table penstock.queued_jobs set (autovacuum_enabled = off)")
    for first in range(0, jobs, 100_000):
        # In many transactions, as workers settle: a search goes by their numbers.
        for part in range(first, min(first + 100_000, jobs), 10_000):
            await sql.execute(
                """
                insert into penstock.archived_jobs
                    (id, finished_at, created_at, run_after, started_at, status, attempt, max_attempts, priority, name, worker,
                    key, signature, data, errors)
                select
                    penstock.new_id(), now() - ($2 - n) * interval '1 millisecond', now(), now(), now(),
                    (case when failed then 'failed' else 'succeeded' end)::penstock.archived_job_status, 1, 1, 0, 'a',
                    'w' || n % 3, 'k' || n % 1000, case when failed then substr(md5((n % 7)::text), 1, 16) end,
                    '{"customer": "acme"}',
                    case when failed then jsonb_build_array(jsonb_build_object('type', 'E', 'message', 'number ' || n)) end
                from generate_series($1::integer, $1 + 9999) as n
                cross join lateral (select n % 20 = 0 as failed) as made
                """,
                part, jobs, timeout=300,
            )  # fmt: skip
        size = min(100_000, jobs - first)
        await sql.execute(
            "select count(*) from penstock.enqueue_many('a', array_fill('{\"n\": 1}'::jsonb, array[$1::integer]))",
            size,
            timeout=300,
        )
    # A gather and an add_many open groups too; half of these are in another one.
    await sql.execute(
        """
        insert into penstock.job_groups (id, name, created_at, changed_at, finished_at, on_failure, parent)
        select penstock.new_id(), 'g' || n, now(), now(), now(), 'cancel', case when n % 2 = 0 then $2::uuid end
        from generate_series(1, $1::integer / 4) as n
        """,
        jobs, await sql.fetchval("select penstock.open_group('imports')"), timeout=300,
    )  # fmt: skip
    await sql.execute("analyze", timeout=300)


async def blocks(sql: Sql, query: str, arguments: tuple[Any, ...]) -> int:
    """The pages of tables and indexes that a statement looks at."""
    (row,) = await sql.fetch(f"explain (analyze, buffers, timing off, format json) {query}", *arguments, timeout=300)
    plan = json.loads(row[0])[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def test_every_page_is_opened() -> None:
    opened = {found.template.strip("/") for path in OPENED if (found := find(path.partition("?")[0])[0]) is not None}
    assert opened | NOT_OPENED == {page.path for page in PAGES}


@pytest.mark.soak
async def test_each_statement_of_each_page_is_bounded_with_a_million_jobs(app: Penstock, sql: Sql, recorder: Recorder) -> None:
    await fill(app, sql, JOBS)
    message = (await (await app.find_topic("t")).publish({"n": 1})).id
    group = await sql.fetchval("select penstock.open_group('imports')")
    id = await sql.fetchval("select id from penstock.archived_jobs where status = 'failed' order by finished_at desc limit 1")
    poller = Poller(app)
    large = {}
    for path in OPENED:
        address, _, query = path.format(id=id, message=message, group=group).partition("?")
        target, parameters = find(address)
        assert target is not None and target.page is not None, path
        given = dict(pair.split("=", 1) for pair in query.replace("%20", " ").split("&") if pair)
        view = Recording(app, poller, Principal("u", Role.ADMIN), Masking(()), address, parameters, given)
        view.recorder = recorder
        recorder.seen.clear()
        await target.page.show(view)
        assert recorder.seen or path == "/", path
        for statement, arguments in list(recorder.seen.items()):
            looked = await blocks(sql, statement, arguments)
            if looked > MOST_BLOCKS:
                large[path, statement] = looked
    assert large == {}
