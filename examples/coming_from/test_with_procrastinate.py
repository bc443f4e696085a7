"""The order service with Procrastinate: its worker in the test's process, on the database of the test."""

import asyncio
from datetime import timedelta

import pytest
from procrastinate import PsycopgConnector

from examples.coming_from import scenario, shop
from examples.coming_from.with_procrastinate import app, place


async def work() -> None:
    async with app.open_async():
        worker = asyncio.create_task(app.run_worker_async(install_signal_handlers=False, fetch_job_polling_interval=0.1))
        await asyncio.to_thread(scenario.wait_until_done)
        worker.cancel()
        await asyncio.wait([worker])


def test_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shop, "REMIND_AFTER", timedelta(seconds=1))
    with app.replace_connector(PsycopgConnector(conninfo=shop.database_url())):
        with app.open():
            app.schema_manager.apply_schema()
            for order in scenario.ORDERS:
                place(*order)
        asyncio.run(work())
    scenario.check()
