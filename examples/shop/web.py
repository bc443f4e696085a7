"""The shop's web application: it writes down what customers want, and leaves the work to the workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated
from uuid import NAMESPACE_URL, uuid5

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from examples.shop.tables import Bonus, Order, create_tables, engine
from examples.shop.work import Parcel, Placed, app, orders, points, send_confirmation, session, shipped


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    """Open the application, which declares its work, and create the tables."""
    async with app:
        url = app.database_url("asyncpg")
        await create_tables(url)
        yield
        await engine(url).dispose()


async def transaction() -> AsyncIterator[AsyncSession]:
    """One transaction for each request: everything in it happens, or nothing."""
    async with session() as database, database.begin():
        yield database


web = FastAPI(title="Shop", lifespan=lifespan)
# It ends, and so commits, before the answer is sent: who has the answer sees the order.
Database = Annotated[AsyncSession, Depends(transaction, scope="function")]


class Wanted(BaseModel):
    """An order as the browser sends it."""

    customer: str = Field(min_length=1, max_length=100)
    article: str = Field(min_length=1, max_length=100)
    cents: int = Field(gt=0, le=10_000_00)


@web.post("/orders", status_code=201)
async def place_order(wanted: Wanted, database: Database) -> dict[str, int]:
    """The order, the mail, the points and the event: all in one transaction."""
    order = Order(customer=wanted.customer, article=wanted.article, cents=wanted.cents)
    database.add(order)
    await database.flush()  # gives the order its number
    placed = Placed(order.id, order.customer, order.article, order.cents)
    await send_confirmation.options(key=order.customer, connection=database).enqueue(order.id)
    await points.enqueue(order.customer, placed, connection=database)
    await orders.append(placed, connection=database)
    return {"order": order.id}


@web.post("/orders/{number}/ship", status_code=202)
async def ship(number: int, database: Database) -> dict[str, int]:
    """Hand a parcel to the carrier; shipping an order twice is one message."""
    order = await database.get(Order, number)
    if order is None:
        raise HTTPException(404, f"no such order: {number}")
    receipt = await shipped.publish(
        Parcel(order.id, order.customer, order.article), id=uuid5(NAMESPACE_URL, f"shop/shipped/{number}"), connection=database
    )
    return {"subscribers": receipt.receivers}


@web.get("/customers/{customer}")
async def customer(customer: str, database: Database) -> dict[str, int]:
    """A customer's bonus points."""
    mine = select(Bonus.balance).where(Bonus.customer == customer)
    return {"points": await database.scalar(mine.order_by(Bonus.line.desc()).limit(1)) or 0}
