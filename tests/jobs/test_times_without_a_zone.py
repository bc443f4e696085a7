"""A time without a zone is refused by the Python API and by documents in SQL: it would be another moment in each session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import asyncpg
import pytest

from penstock import InvalidInput, JobFilter, NewEvent, NewJob, NewMessage, Penstock
from penstock.client import AsyncClient

NAIVE = datetime(2036, 1, 11, 18, 26, 26)


class Nowhere(tzinfo):
    """A time zone that does not know its offset, which is none."""

    def utcoffset(self, when: datetime | None) -> timedelta | None:
        return None

    def tzname(self, when: datetime | None) -> str | None:
        return None

    def dst(self, when: datetime | None) -> timedelta | None:
        return None


def _orders(app: Any) -> Any:
    declared = getattr(app, "streams", None)
    return declared["orders"] if isinstance(declared, dict) and "orders" in declared else app.stream("orders")


Call = Callable[[Any, datetime], Awaitable[Any]]
CALLS: dict[str, tuple[str, Call]] = {
    "enqueue run_after": ("run_after", lambda app, at: app.enqueue("ship", run_after=at)),
    "enqueue expires_at": ("expires_at", lambda app, at: app.enqueue("ship", expires_at=at)),
    "enqueue_many run_after": ("run_after", lambda app, at: app.enqueue_many("ship", [NewJob(1), NewJob(2, run_after=at)])),
    "enqueue_many expires_at": ("expires_at", lambda app, at: app.enqueue_many("ship", [NewJob(1), NewJob(2, expires_at=at)])),
    "publish run_after": ("run_after", lambda app, at: app.topic("news").publish(1, run_after=at)),
    "publish expires_at": ("expires_at", lambda app, at: app.topic("news").publish(1, expires_at=at)),
    "publish_many": ("run_after", lambda app, at: app.topic("news").publish_many([NewMessage(1, run_after=at)])),
    "append": ("time", lambda app, at: _orders(app).append(1, time=at)),
    "append_many": ("time", lambda app, at: _orders(app).append_many([NewEvent(1, time=at)])),
    "offsets_at": ("position", lambda app, at: _orders(app).offsets_at(at)),
    "seek": ("position", lambda app, at: _orders(app).seek("billing", at)),
    "operations.preview": ("since", lambda app, at: app.operations.preview("cancel", JobFilter(name="ship", since=at))),
    "operations.start": ("until", lambda app, at: app.operations.start("cancel", JobFilter(name="ship", until=at))),
}


async def _prepare(app: Penstock) -> None:
    await app.create_job_type("ship")
    await app.create_stream("orders")
    await app.topic("news").publish("the first")


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_refuses_a_time_without_a_zone(app: Penstock, sql: asyncpg.Connection[Any], call: str) -> None:
    await _prepare(app)
    what, made = CALLS[call]
    for time in (NAIVE, NAIVE.replace(tzinfo=Nowhere())):
        with pytest.raises(InvalidInput, match=f"{what}.* has no time zone(.|\n)*datetime.now"):
            await made(app, time)
    assert await _left(sql) == (0, 0, 1, 0)


# A server does not tell offsets of times.
@pytest.mark.parametrize("call", [call for call in CALLS if call != "offsets_at"])
def test_a_client_over_http_refuses_it_before_it_sends(call: str) -> None:
    async def main() -> None:
        # Nothing listens there.
        async with AsyncClient("http://127.0.0.1:9", "admin", "none") as client:
            what, made = CALLS[call]
            for time in (NAIVE, NAIVE.replace(tzinfo=Nowhere())):
                with pytest.raises(InvalidInput, match=f"{what}.* has no time zone(.|\n)*datetime.now"):
                    await made(client, time)

    asyncio.run(main())


async def _left(sql: asyncpg.Connection[Any]) -> tuple[int, ...]:
    """How many jobs, operations, messages and events there are."""
    tables = ("queued_jobs", "operations", "topic_messages")
    counts = [await sql.fetchval(f"select count(*) from penstock.{table}") for table in tables]
    return *counts, await sql.fetchval(
        "select sum(next_offset - first_offset)::integer from penstock.bounds_of_streams(array['orders'])"
    )


Document = Callable[[str], Any]
DOCUMENTS: dict[str, tuple[str, str, Document]] = {
    "enqueue_json run_after": ("run_after", "select penstock.enqueue_json('ship', $1)", lambda at: [{"run_after": at}]),
    "enqueue_json expires_at": ("expires_at", "select penstock.enqueue_json('ship', $1)", lambda at: [{}, {"expires_at": at}]),
    "publish_json run_after": ("run_after", "select penstock.publish_json('news', $1)", lambda at: {"run_after": at}),
    "publish_json expires_at": ("expires_at", "select penstock.publish_json('news', $1)", lambda at: [{}, {"expires_at": at}]),
    "append_json": ("time", "select penstock.append_json('orders', $1)", lambda at: [{"data": 1, "time": at}]),
    "append_each_json": ("time", "select penstock.append_each_json('orders', $1)", lambda at: [{"data": 1, "time": at}]),
    "start_operation since": ("since", "select penstock.start_operation('cancel', $1)", lambda at: {"since": at}),
    "start_operation until": ("until", "select penstock.start_operation('replay', $1)", lambda at: {"until": at}),
    "preview_operation": ("since", "select penstock.preview_operation('purge', $1)", lambda at: {"name": "ship", "since": at}),
}
NO_ZONE, NO_TIME = "has no time zone", "is not a time"


@pytest.mark.parametrize("document", DOCUMENTS)
async def test_a_document_in_sql_refuses_a_time_without_a_zone_whatever_the_session_has_set(
    app: Penstock, sql: asyncpg.Connection[Any], document: str
) -> None:
    await _prepare(app)
    field, statement, of = DOCUMENTS[document]

    async def call(text: str) -> Any:
        return await sql.fetch(statement, json.dumps(of(text)))

    for setting in ("set timezone = 'America/New_York'", "set datestyle = 'german'", "set intervalstyle = 'sql_standard'"):
        await sql.execute(setting)
        for text, said in (
            ("2036-01-11T18:26:26", NO_ZONE), ("2036-01-11 18:26", NO_ZONE), ("2036-01-11", NO_ZONE), ("now", NO_TIME),
            ("", NO_TIME), ("tomorrow", NO_TIME), ("epoch", NO_TIME), ("11.01.2036 18:26 UTC", NO_TIME),
            ("2036-01-11T18:26:26 Europe/Berlin", NO_TIME),
        ):  # fmt: skip
            with pytest.raises(asyncpg.PostgresError, match=f"{field} {said}: ") as refused:
                await call(text)
            assert refused.value.sqlstate == "PS400" and "2026-01-31T12:00:00Z" in refused.value.hint
        for text in ("infinity", "-infinity", "10000-01-01T00:00:00Z"):
            with pytest.raises(asyncpg.PostgresError, match="a time is out of range") as refused:
                await call(text)
            assert refused.value.sqlstate == "PS400"
        for text in ("2036-02-30T18:26:26Z", "2036-01-11T25:26:26Z", "2036-01-11T18:26:26+99"):
            with pytest.raises(asyncpg.PostgresError) as refused:
                await call(text)
            assert refused.value.sqlstate == "PS400"
    assert await _left(sql) == (0, 0, 1, 0)
    for text in ("2036-01-11T18:26:26Z", "2036-01-11 18:26:26.25+05:30", "2036-01-11T18:26-0330", "2036-01-11T18:26:26+00:53:28"):
        assert await call(text)


async def test_a_time_in_a_document_is_the_same_in_each_session(app: Penstock, sql: asyncpg.Connection[Any]) -> None:
    await _prepare(app)
    for zone in ("UTC", "America/New_York", "Australia/Lord_Howe"):
        await sql.execute(f"set timezone = '{zone}'")
        await sql.execute("select penstock.enqueue_json('ship', $1)", json.dumps([{"run_after": "2036-01-11T18:26:26+01:00"}]))
    assert {job.run_after for job in await app.find_many(name="ship")} == {datetime(2036, 1, 11, 17, 26, 26, tzinfo=UTC)}
