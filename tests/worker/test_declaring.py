"""Declaring job types: what is accepted, what is refused at once, and who need not have the right to."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from penstock import Backoff, InvalidInput, Job, NotFound, Options, Penstock, RateLimit


def test_the_decorator_works_without_parentheses() -> None:
    app = Penstock("postgresql://nowhere/x")

    @app.job
    async def send_mail(job: Job[str]) -> None: ...

    assert send_mail.name == "send-mail"
    assert app.types["send-mail"].handler is not None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (Options(visibility_timeout=30), "visibility_timeout"),  # type: ignore[arg-type]
        (Options(time_limit=30), "time_limit"),  # type: ignore[arg-type]
        (Options(backoff=Backoff(base=1)), "backoff.base"),  # type: ignore[arg-type]
        (Options(rate_limit=RateLimit(1, 1)), "rate_limit.period"),  # type: ignore[arg-type]
    ],
)
def test_a_span_that_is_no_timedelta_is_refused(options: Options, named: str) -> None:
    with pytest.raises(InvalidInput, match=f"{named} of x must be a timedelta"):
        Penstock("postgresql://nowhere/x").job_type("x", Any, options)


def test_a_setting_that_is_no_good_is_invalid_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POOL_SIZE", "many")
    with pytest.raises(InvalidInput, match=r"pool_size.*integer[^$]*PENSTOCK_POOL_SIZE"):
        Penstock()


async def test_a_producer_enqueues_types_that_it_may_not_declare(app: Penstock, url: str, sql: asyncpg.Connection[Any]) -> None:
    role = "producer_" + str(await sql.fetchval("select current_database()"))[-12:]
    await sql.execute(f"create role {role} login password 'secret'")
    try:
        await sql.execute(f"select penstock.grant_access('{role}', 'producer')")
        parts = urlsplit(url)
        theirs = urlunsplit(parts._replace(netloc=f"{role}:secret@{parts.netloc.rpartition('@')[2]}"))
        async with Penstock(theirs) as producer:
            ship = producer.job_type("ship", Any, Options(visibility_timeout=timedelta(seconds=30)))
            with pytest.raises(NotFound):
                await ship.enqueue({})
            await app.create_job_type("ship")
            receipt = await ship.enqueue({})
        assert (await app.find(receipt.id)).name == "ship"
    finally:
        await sql.execute(f"drop owned by {role}; drop role {role}")
