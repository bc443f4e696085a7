"""Enqueueing through the caller's own connection: the job exists when the caller's transaction commits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import django
import psycopg
import pytest
import sqlalchemy
from django.conf import settings
from django.db import connection, transaction
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from penstock import InvalidInput, NotFound, Penstock
from penstock.job import Admission, Enqueued


def sqlalchemy_url(url: str, driver: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://")


async def by_asyncpg(url: str, use: Any, commit: bool, stack: AsyncExitStack) -> None:
    connection = await asyncpg.connect(url)
    transaction = connection.transaction()
    await transaction.start()
    await use(connection)
    await (transaction.commit() if commit else transaction.rollback())
    await connection.close()


async def by_psycopg(url: str, use: Any, commit: bool, stack: AsyncExitStack) -> None:
    connection = await psycopg.AsyncConnection.connect(url)
    await use(connection)
    await (connection.commit() if commit else connection.rollback())
    await connection.close()


async def by_sqlalchemy_connection(url: str, use: Any, commit: bool, stack: AsyncExitStack) -> None:
    engine = create_async_engine(sqlalchemy_url(url, "asyncpg"))
    async with engine.connect() as connection:
        await use(connection)
        await (connection.commit() if commit else connection.rollback())
    await engine.dispose()


async def by_sqlalchemy_session(url: str, use: Any, commit: bool, stack: AsyncExitStack) -> None:
    engine = create_async_engine(sqlalchemy_url(url, "psycopg"))
    async with AsyncSession(engine) as session:
        await use(session)
        await (session.commit() if commit else session.rollback())
    await engine.dispose()


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("way", [by_asyncpg, by_psycopg, by_sqlalchemy_connection, by_sqlalchemy_session])
async def test_async_connections(app: Penstock, url: str, way: Callable[..., Awaitable[None]], commit: bool) -> None:
    ship = app.job_type("ship")
    await ship.enqueue_many([])
    receipts: list[Enqueued] = []

    async def use(connection: Any) -> None:
        receipts.append(await ship.enqueue({"n": 1}, key="acme", unique="u", connection=connection))
        receipts.append(await ship.enqueue({"n": 2}, unique="u", connection=connection))

    async with AsyncExitStack() as stack:
        await way(url, use, commit, stack)
    assert receipts[1] == Enqueued(receipts[0].id, Admission.COALESCED)
    if commit:
        record = await app.find(receipts[0].id)
        assert (record.data, record.key) == ({"n": 1}, "acme")
    else:
        with pytest.raises(NotFound):
            await app.find(receipts[0].id)


def test_blocking_connections_and_the_sync_facade(url: str) -> None:
    app = Penstock(url)
    ship = app.job_type("ship")
    try:
        first = app.sync.enqueue(ship, {"n": 0})
        with psycopg.connect(url) as connection:
            second = app.sync.enqueue(ship, {"n": 1}, connection=connection)
        engine = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"))
        with Session(engine) as session:
            third = app.sync.enqueue("ship", {"n": 2}, connection=session)
            session.commit()
        with engine.begin() as core:
            fourth = app.sync.enqueue(ship, {"n": 3}, connection=core)
            with pytest.raises(InvalidInput, match="priority"):
                app.sync.enqueue(ship, {}, priority=999, connection=core)
        with engine.begin() as core, pytest.raises(NotFound, match="no such job type"):
            app.sync.enqueue("none", {}, connection=core)
        engine.dispose()
        assert [app.sync.find(r.id).data["n"] for r in (first, second, third, fourth)] == [0, 1, 2, 3]
        assert app.sync.counts()[0].ready == 4
        assert app.sync.cancel(first.id) == "cancelled"
        assert app.sync.replay(first.id).id != first.id
    finally:
        app.sync.close()


def test_django(url: str) -> None:
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **django_database(url)}}, INSTALLED_APPS=[]
    )
    django.setup()
    app = Penstock(url)
    ship = app.job_type("ship")
    try:
        app.sync.enqueue_many(ship, [])
        with transaction.atomic():
            kept = app.sync.enqueue(ship, {"n": 1}, connection=connection)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            lost = app.sync.enqueue(ship, {"n": 2}, connection=connection)
            1 / 0  # noqa: B018
        with pytest.raises(InvalidInput, match="priority"), transaction.atomic():
            app.sync.enqueue(ship, {}, priority=999, connection=connection)
        assert app.sync.find(kept.id).data == {"n": 1}
        with pytest.raises(NotFound):
            app.sync.find(lost.id)
    finally:
        connection.close()
        app.sync.close()


def django_database(url: str) -> dict[str, Any]:
    parts = psycopg.conninfo.conninfo_to_dict(url)
    return {"NAME": parts["dbname"], "USER": parts["user"], "HOST": parts.get("host", ""), "PORT": parts.get("port", "")}
