"""Enqueueing through the caller's own connection: the job exists when the caller's transaction commits."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import Any

import asyncpg
import django
import flask
import flask_sqlalchemy
import psycopg
import pytest
import sqlalchemy
import sqlmodel
import sqlmodel.ext.asyncio.session
from django.conf import settings
from django.db import connection, transaction
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from penstock import InvalidInput, NotFound, Penstock, PenstockError, QueueFull, SchemaMismatch
from penstock.jobs.models import Enqueued, EnqueueOutcome


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


class OwnAsyncSession(AsyncSession):
    """As applications define them."""


class OwnSession(Session):
    """As applications define them."""


class OwnPsycopg(psycopg.AsyncConnection[Any]):
    """As applications define them."""


class OwnAsyncpg(asyncpg.Connection):  # type: ignore[type-arg]
    """As applications define them."""


async def by_asyncpg_pool(url: str, use: Any, commit: bool, stack: AsyncExitStack) -> None:
    async with asyncpg.create_pool(url, min_size=0, connection_class=OwnAsyncpg) as pool, pool.acquire() as connection:
        with pytest.raises(InvalidInput, match="a Pool has no transaction"):
            await use(pool)
        transaction = connection.transaction()
        await transaction.start()
        await use(connection)
        await (transaction.commit() if commit else transaction.rollback())


async def by_asyncpg_subclass(url: str, use: Any, commit: bool, stack: AsyncExitStack) -> None:
    connection = await asyncpg.connect(url, connection_class=OwnAsyncpg)
    transaction = connection.transaction()
    await transaction.start()
    await use(connection)
    await (transaction.commit() if commit else transaction.rollback())
    await connection.close()


async def by_psycopg_subclass(url: str, use: Any, commit: bool, stack: AsyncExitStack) -> None:
    connection = await OwnPsycopg.connect(url)
    await use(connection)
    await (connection.commit() if commit else connection.rollback())
    await connection.close()


async def by_session_of(kind: Any, url: str, use: Any, commit: bool, stack: AsyncExitStack) -> None:
    engine = create_async_engine(sqlalchemy_url(url, "asyncpg"))
    with pytest.raises(InvalidInput, match="an? AsyncEngine has no transaction"):
        await use(engine)
    async with kind(engine) as session:
        await use(session)
        await (session.commit() if commit else session.rollback())
    await engine.dispose()


async def by_async_scoped_session(url: str, use: Any, commit: bool, stack: AsyncExitStack) -> None:
    engine = create_async_engine(sqlalchemy_url(url, "asyncpg"))
    session = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    await use(session)
    await (session.commit() if commit else session.rollback())
    await session.remove()
    await engine.dispose()


SUBCLASSES = [
    by_asyncpg_pool, by_asyncpg_subclass, by_psycopg_subclass, by_async_scoped_session,
    partial(by_session_of, OwnAsyncSession), partial(by_session_of, sqlmodel.ext.asyncio.session.AsyncSession),
]  # fmt: skip


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("way", [by_asyncpg, by_psycopg, by_sqlalchemy_connection, by_sqlalchemy_session, *SUBCLASSES])
async def test_async_connections(app: Penstock, url: str, way: Callable[..., Awaitable[None]], commit: bool) -> None:
    ship = app.job_type("ship")
    await ship.enqueue_many([])
    receipts: list[Enqueued] = []

    async def use(connection: Any) -> None:
        receipts.append(await ship.options(key="acme", unique="u", connection=connection).enqueue({"n": 1}))
        receipts.append(await ship.options(unique="u", connection=connection).enqueue({"n": 2}))

    async with AsyncExitStack() as stack:
        await way(url, use, commit, stack)
    assert receipts[1] == Enqueued(receipts[0].id, EnqueueOutcome.COALESCED)
    if commit:
        record = await app.find(receipts[0].id)
        assert (record.data, record.key) == ({"n": 1}, "acme")
    else:
        with pytest.raises(NotFound):
            await app.find(receipts[0].id)


async def refusal(url: str, way: Callable[..., Awaitable[None]], enqueue: Callable[[Any], Awaitable[Any]]) -> PenstockError:
    """The error of an enqueue through a connection of the caller, whose transaction is rolled back."""
    refused: list[PenstockError] = []

    async def use(connection: Any) -> None:
        try:
            await enqueue(connection)
        except PenstockError as error:
            refused.append(error)

    async with AsyncExitStack() as stack:
        await way(url, use, False, stack)
    return refused[0]


@pytest.mark.parametrize("way", [by_asyncpg, by_psycopg, by_sqlalchemy_connection, by_sqlalchemy_session])
async def test_an_error_says_once_what_to_do_through_each_kind_of_connection(
    app: Penstock, url: str, way: Callable[..., Awaitable[None]]
) -> None:
    ship = app.job_type("ship", max_waiting=1)
    await ship.enqueue({})
    error = await refusal(url, way, lambda connection: ship.options(connection=connection).enqueue({}))
    assert isinstance(error, QueueFull)
    assert error.message == "the queue of ship is full: 1 of at most 1 jobs wait, and 1 more do not fit"
    assert str(error).count("Nothing was written") == 1


@pytest.mark.parametrize("way", [by_asyncpg, by_psycopg, by_sqlalchemy_connection, by_sqlalchemy_session])
async def test_a_database_without_the_schema_is_named_through_each_kind_of_connection_without_the_payload(
    sql: asyncpg.Connection[Any], url: str, way: Callable[..., Awaitable[None]]
) -> None:
    ship = Penstock(url).job_type("ship")
    await sql.execute("drop schema penstock cascade")
    error = await refusal(url, way, lambda connection: ship.options(connection=connection).enqueue({"card": "4111"}))
    assert isinstance(error, SchemaMismatch)
    assert error.message == 'the database has no matching Penstock schema: schema "penstock" does not exist'
    assert error.hint == "Run: penstock migrate"


async def test_a_connection_to_another_system_is_named_without_the_payload(app: Penstock) -> None:
    """As where the tests of an application run on SQLite."""
    ship = app.job_type("ship")
    engine = sqlalchemy.create_engine("sqlite://")
    with (
        engine.connect() as of_core,
        Session(engine) as of_orm,
        closing(sqlite3.connect(":memory:")) as of_driver,
    ):
        others: list[Any] = [of_core, of_orm, scoped_session(sessionmaker(engine)), of_driver]
        for other in others:
            with pytest.raises(InvalidInput, match="the connection is to sqlite, not to the PostgreSQL") as raised:
                await ship.options(connection=other).enqueue({"card": "4111"})
            assert "4111" not in str(raised.value)
            assert raised.value.__suppress_context__


@pytest.mark.parametrize("way", [by_asyncpg, by_psycopg, by_sqlalchemy_connection, by_sqlalchemy_session])
async def test_a_blocking_call_refuses_an_asynchronous_connection(url: str, way: Callable[..., Awaitable[None]]) -> None:
    ship = Penstock(url).job_type("ship")
    refused: list[InvalidInput] = []

    async def use(connection: Any) -> None:
        try:
            ship.sync.options(connection=connection).enqueue({})
        except InvalidInput as error:
            refused.append(error)

    async with AsyncExitStack() as stack:
        await way(url, use, False, stack)
    assert "this connection is async" in str(refused)


async def test_a_blocking_call_through_a_connection_needs_no_other_one_whatever_runs_in_its_thread(
    app: Penstock, url: str
) -> None:
    ship = app.job_type("ship")
    await ship.declare()
    with psycopg.connect(url) as connection:
        receipts = ship.sync.enqueue_many([{"n": n} for n in range(10_001)], connection=connection)
    assert len({receipt.id for receipt in receipts}) == 10_001
    assert app.context.background.loop is None
    assert (await app.counts())[0].ready == 10_001


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


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_sessions_of_others_that_block(url: str) -> None:
    app = Penstock(url)
    ship = app.job_type("ship")
    engine = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"))
    flask_app = flask.Flask("shop")
    flask_app.config["SQLALCHEMY_DATABASE_URI"] = sqlalchemy_url(url, "psycopg")
    flasks = flask_sqlalchemy.SQLAlchemy(flask_app)
    try:
        app.sync.enqueue_many(ship, [])
        for refused in (engine, sessionmaker(engine)):
            with pytest.raises(InvalidInput, match="has no transaction"):
                app.sync.enqueue(ship, {}, connection=refused)
        with flask_app.app_context():
            own = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"))
            sessions = [
                OwnSession(engine),
                sqlmodel.Session(engine),
                scoped_session(sessionmaker(engine)),
                flasks.session,
                own.connect(),
            ]
            for number, session in enumerate(sessions):
                lost = app.sync.enqueue(ship, {"n": number}, connection=session)
                session.rollback()
                kept = app.sync.enqueue(ship, {"n": number}, connection=session)
                session.commit()
                session.close()
                assert app.sync.find(kept.id).data == {"n": number}
                with pytest.raises(NotFound):
                    app.sync.find(lost.id)
            flasks.engine.dispose()
            own.dispose()
    finally:
        engine.dispose()
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
