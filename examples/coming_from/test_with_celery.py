"""The order service with Celery: a solo worker in a thread, on the transport in memory, and a tick of beat."""

from datetime import timedelta

import pytest
from celery.beat import Scheduler
from celery.contrib.testing.worker import start_worker

from examples.coming_from import scenario, shop
from examples.coming_from.with_celery import app, place


def test_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shop, "REMIND_AFTER", timedelta(seconds=1))
    app.conf.broker_url = "memory://"
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=60):
        for order in scenario.ORDERS:
            place(*order)
        beat = Scheduler(app=app)
        beat.schedule["close-the-day"].last_run_at -= timedelta(days=1)
        beat.tick()
        scenario.wait_until_done()
    scenario.check()
