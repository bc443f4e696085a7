"""The order service with Dramatiq: a worker in the test's process, on the broker for tests."""

from datetime import timedelta

import pytest
from dramatiq import Worker, get_broker

from examples.coming_from import scenario, shop
from examples.coming_from.with_dramatiq import close_the_day, place


def test_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shop, "REMIND_AFTER", timedelta(seconds=1))
    broker = get_broker()
    worker = Worker(broker, worker_timeout=100)
    worker.start()
    for order in scenario.ORDERS:
        place(*order)
    close_the_day.send()  # as cron does
    broker.join("default", timeout=60_000)
    worker.stop()
    scenario.check()
