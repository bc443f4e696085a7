"""The shop's own tables, in the same database as Penstock's."""

from __future__ import annotations

from datetime import date
from functools import cache

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """All tables of the shop."""


class Order(Base):
    """What a customer ordered."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    article: Mapped[str]
    cents: Mapped[int]
    shipped: Mapped[bool] = mapped_column(default=False)


class Mail(Base):
    """A mail that went out. A real shop would talk to a mail server here."""

    __tablename__ = "mails"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    text: Mapped[str]


class Bonus(Base):
    """A line of a customer's ledger of bonus points."""

    __tablename__ = "bonuses"
    line: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[int] = mapped_column(unique=True)
    customer: Mapped[str] = mapped_column(index=True)
    points: Mapped[int]
    balance: Mapped[int]


class Sale(Base):
    """What an article brought in, over all orders."""

    __tablename__ = "sales"
    article: Mapped[str] = mapped_column(primary_key=True)
    orders: Mapped[int]
    cents: Mapped[int]


class Takings(Base):
    """The takings up to a day, written each night."""

    __tablename__ = "takings"
    day: Mapped[date] = mapped_column(primary_key=True)
    cents: Mapped[int]


@cache
def engine(url: str) -> AsyncEngine:
    """The connections of this process to a database."""
    return create_async_engine(url)


async def create_tables(url: str) -> None:
    """Create what is not there; a real shop has migrations (docs/frameworks.md)."""
    async with engine(url).begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


def session_on(url: str) -> AsyncSession:
    """A session, to be used in one task."""
    return AsyncSession(engine(url), expire_on_commit=False)
