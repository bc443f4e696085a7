"""Declaring job types: what is accepted, what is refused at once, and who need not have the right to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from pydantic import BaseModel, SecretStr

from penstock import Backoff, InvalidInput, Job, NotFound, Penstock, RateLimit, Retention
from penstock.testing import TemporaryDatabases
from tests.command_line import penstock

Sql: TypeAlias = "asyncpg.Connection[Any]"


def test_the_decorator_works_without_parentheses() -> None:
    app = Penstock("postgresql://nowhere/x")

    @app.job
    async def send_mail(job: Job[str]) -> None: ...

    assert send_mail.name == "send-mail"
    assert app.types["send-mail"].handler is not None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"visibility_timeout": 30}, "visibility_timeout"),
        ({"time_limit": 30}, "time_limit"),
        ({"backoff": Backoff(base=1)}, "backoff.base"),  # type: ignore[arg-type]
        ({"rate_limit": RateLimit(1, 1)}, "the period of rate_limit"),  # type: ignore[arg-type]
    ],
)
def test_a_span_that_is_no_timedelta_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=f"{named} of x must be a span of time"):
        Penstock("postgresql://nowhere/x").job_type("x", **options)


def test_a_setting_that_is_no_good_is_invalid_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POOL_SIZE", "many")
    with pytest.raises(InvalidInput, match=r"PENSTOCK_POOL_SIZE 'many' is not valid: .*valid integer"):
        Penstock()


async def test_a_producer_enqueues_types_that_it_may_not_declare(app: Penstock, url: str, sql: asyncpg.Connection[Any]) -> None:
    role = "producer_" + str(await sql.fetchval("select current_database()"))[-12:]
    await sql.execute(f"create role {role} login password 'secret'")
    try:
        await sql.execute(f"select penstock.grant_access('{role}', 'producer')")
        parts = urlsplit(url)
        theirs = urlunsplit(parts._replace(netloc=f"{role}:secret@{parts.netloc.rpartition('@')[2]}"))
        async with Penstock(theirs) as producer:
            ship = producer.job_type("ship", Any, visibility_timeout=timedelta(seconds=30))
            with pytest.raises(NotFound):
                await ship.enqueue({})
            await app.create_job_type("ship")
            receipt = await ship.enqueue({})
        assert (await app.find(receipt.id)).name == "ship"
    finally:
        await sql.execute(f"drop owned by {role}; drop role {role}")


class Sale(BaseModel):
    total: float


def shop(url: str) -> tuple[Penstock, Any, Any, Any, Any]:
    app = Penstock(url)

    @app.job("invoice", max_attempts=7)
    async def invoice(job: Job[Sale]) -> None: ...

    tenants = app.pool("tenants", slots=8)
    sales = app.topic("sales", Sale)

    @sales.subscriber("accounting", max_attempts=4)
    async def account(job: Job[Sale]) -> None: ...

    orders = app.stream("orders", Sale, partitions=2, keep=Retention(age=timedelta(days=7)))
    return app, invoice, tenants, sales, orders


async def test_an_application_that_is_opened_declares_everything_with_the_options_of_its_code(url: str, sql: Sql) -> None:
    app, *_ = shop(url)
    async with app:
        types = await sql.fetch("select name, max_attempts from penstock.jobs order by name")
        assert [tuple(row) for row in types] == [("invoice", 7), ("sales_accounting", 4), ("tenants", 5)]
        assert await sql.fetchval("select slots from penstock.groups where name = 'tenants'") == 8
        assert await sql.fetchval("select count(*) from penstock.subscriptions where client_id = 'accounting'") == 1
        assert await sql.fetchval("select keep_age from penstock.streams where name = 'orders'") == timedelta(days=7)


async def test_transactional_enqueue_publish_and_append_work_first_thing_on_a_fresh_database(url: str, sql: Sql) -> None:
    app, invoice, tenants, sales, orders = shop(url)
    async with app:
        # Also what is declared after the opening.
        late, news = app.job_type("late"), app.topic("news")
        async with sql.transaction():
            await invoice.options(connection=sql).enqueue(Sale(total=1))
            await tenants.enqueue("acme", {}, connection=sql)
            await late.options(connection=sql).enqueue({})
            await orders.append(Sale(total=1), connection=sql)
            await news.publish({}, connection=sql)
            await sales.publish(Sale(total=1), connection=sql)
        names = await sql.fetch("select name from penstock.queued_jobs order by name")
        assert [row["name"] for row in names] == ["invoice", "late", "sales_accounting", "tenants"]


async def test_one_application_declares_in_each_database_that_it_is_used_with(databases: TemporaryDatabases) -> None:
    with databases.database() as first, databases.database() as second:
        app, invoice, _, sales, orders = shop(first)
        for place in (first, second):
            app.context.settings = app.settings.model_copy(update={"database_url": SecretStr(place)})
            async with app:
                await invoice.enqueue(Sale(total=1))
                await sales.publish(Sale(total=1))
                await orders.append(Sale(total=1))
                assert {counts.name for counts in await app.counts()} == {"invoice", "sales_accounting", "tenants"}


async def test_the_error_of_a_type_that_is_not_declared_says_how_to_declare_it(url: str, sql: Sql) -> None:
    _, invoice, *_ = shop(url)
    with pytest.raises(NotFound, match="no such job type: invoice") as refused:
        await invoice.options(connection=sql).enqueue(Sale(total=1))
    assert "penstock declare" in str(refused.value.hint)


async def test_the_command_declares_at_deploy_and_says_when_its_role_may_not(
    app: Penstock, url: str, sql: Sql, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(
        "from penstock import Penstock\n"
        "app = Penstock()\n"
        "app.job_type('invoice', max_attempts=7)\n"
        "app.stream('orders', partitions=2)\n"
        "app.topic('sales')\n"
    )
    await app.migrate()
    role, parts = "deploying_" + str(await sql.fetchval("select current_database()"))[-12:], urlsplit(url)
    await sql.execute(f"create role {role} login password 'secret'; select penstock.grant_access('{role}', 'producer')")
    try:
        theirs = urlunsplit(parts._replace(netloc=f"{role}:secret@{parts.netloc.rpartition('@')[2]}"))
        refused = penstock(theirs, "declare", "shop:app", "--json", cwd=tmp_path)
        assert (refused.returncode, refused.stdout) == (1, ""), refused.stderr
    finally:
        await sql.execute(f"drop owned by {role}; drop role {role}")
    done = penstock(url, "declare", "shop:app", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["topic sales", "job invoice", "stream orders"]
    assert await sql.fetchval("select max_attempts from penstock.jobs where name = 'invoice'") == 7
    assert await sql.fetchval("select partitions from penstock.streams where name = 'orders'") == 2
    assert await sql.fetchval("select exists (select from penstock.topics where name = 'sales')")


async def test_using_the_stream_of_another_application_leaves_its_options_alone(url: str, sql: Sql) -> None:
    owner = Penstock(url)
    owner.stream("orders", partitions=2, keep=Retention(age=timedelta(days=7)), max_event_bytes=500)
    other, again = Penstock(url), Penstock(url)
    used = other.stream("orders")
    again.stream("orders", partitions=2, keep=Retention(age=timedelta(days=7)))
    options = "select keep_age, max_event_bytes from penstock.streams where name = 'orders'"
    async with owner:
        pass
    async with other:
        await used.append({})
        assert tuple(await sql.fetchrow(options)) == (timedelta(days=7), 500)
    async with again:
        assert tuple(await sql.fetchrow(options)) == (timedelta(days=7), 1_048_576), "what is not said any more has its default"


async def test_the_lag_of_a_group_that_is_not_there_is_an_error(app: Penstock) -> None:
    orders = app.stream("orders")
    await orders.append({})
    assert await orders.lag() == []
    with pytest.raises(NotFound, match="has no consumer group billing"):
        await orders.lag("billing")


@dataclass
class Bolt:
    tenant: str
    turns: int = 1


@pytest.mark.parametrize("key", ["tenant", lambda bolt: bolt.tenant], ids=["a field", "a function"])
async def test_a_type_without_a_handler_takes_the_key_from_the_payload_as_one_with_a_handler(app: Penstock, key: Any) -> None:
    tighten = app.job_type("tighten", Bolt, key=key)
    first = await tighten.enqueue(Bolt("acme"))
    second = await tighten.options(key="given").enqueue(Bolt("acme"))
    third = await app.enqueue("tighten", Bolt("bolt"))
    assert [(await app.find(receipt.id)).key for receipt in (first, second, third)] == ["acme", "given", "bolt"]


def test_the_key_of_a_type_without_a_handler_is_checked_at_its_declaration() -> None:
    app = Penstock("postgresql://nowhere/x")
    with pytest.raises(InvalidInput, match="key of job type tighten is 'tenent', and Bolt has no such field") as refused:
        app.job_type("tighten", Bolt, key="tenent")
    assert "tenant" in (refused.value.hint or "")
