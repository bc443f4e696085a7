"""The order service with Penstock: a worker in the test's process, on the database of the test, whose time the test moves."""

import asyncio
from datetime import timedelta

from examples.coming_from import scenario, shop
from examples.coming_from.with_penstock import app, place
from penstock.testing import advance, on_database, run_due


async def test_orders() -> None:
    with on_database(app, shop.database_url()):
        async with app:
            for order in scenario.ORDERS:
                await asyncio.to_thread(place, *order)
            await run_due(app)
            await advance(app, timedelta(minutes=1))
            await run_due(app)
            assert shop.journal("remind") == []
            await advance(app, timedelta(days=3))
            await run_due(app)
    scenario.check()
