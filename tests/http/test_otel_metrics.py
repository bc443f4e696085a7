"""The metrics of a server through OpenTelemetry are those of its scrape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SERVER = """
import asyncio
import json
import re
import threading

import httpx
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from penstock import Penstock, Settings
from penstock.http import create_app
from penstock.http.settings import HttpSettings
from prometheus_client import disable_created_metrics

disable_created_metrics()
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
web = create_app(Penstock(settings=Settings(otel_metrics=True)), settings=HttpSettings(token="token-of-the-test"))


def exported():
    data = reader.get_metrics_data()
    return [
        [metric.name, dict(point.attributes), point.value]
        for of_resource in data.resource_metrics
        for of_scope in of_resource.scope_metrics
        if of_scope.scope.name == "penstock"
        for metric in of_scope.metrics
        for point in metric.data.data_points
    ]


async def main():
    started, ended = asyncio.Event(), asyncio.Event()
    asked = asyncio.Queue()
    await asked.put({"type": "lifespan.startup"})

    async def send(message):
        assert "failed" not in message["type"], message
        (started if "startup" in message["type"] else ended).set()

    task = asyncio.create_task(web({"type": "lifespan", "asgi": {"version": "3.0"}}, asked.get, send))
    await started.wait()
    transport = httpx.ASGITransport(web, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", auth=("admin", "token-of-the-test")) as client:
        body = {"name": "print", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
        assert (await client.post("/v1/jobs", json=body)).status_code < 300
        put = await client.put("/v1/jobs/print/random_id", json={"data": {"card": "s3cret"}})
        assert put.status_code < 300, put.text
        first = await client.get("/metrics")
        found = await asyncio.to_thread(exported)
        scrape = (await client.get("/metrics")).text
    await asked.put({"type": "lifespan.shutdown"})
    await ended.wait()
    await task
    print(json.dumps({"exported": found, "scrape": scrape}))


asyncio.run(main())
"""


def test_an_export_of_a_server_has_the_names_and_labels_of_a_scrape(url: str, tmp_path: Path) -> None:
    program = tmp_path / "serving.py"
    program.write_text(SERVER)
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert "Callback" not in done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    scrape: str = shown["scrape"]
    names = {line.split("{")[0].split(" ")[0] for line in scrape.splitlines() if not line.startswith("#")}
    # The queue never drains, since nothing finishes: a value that OpenTelemetry does not take.
    assert '\npenstock_drain_seconds{type="print"} +Inf\n' in scrape
    assert {name for name, *_ in shown["exported"]} == names - {"penstock_drain_seconds"}
    values = {(name, tuple(sorted(labels.items()))): value for name, labels, value in shown["exported"]}
    assert values["penstock_jobs_enqueued_total", (("outcome", "queued"), ("type", "print"))] == 1
    assert values["penstock_jobs_ready", (("type", "print"),)] == 1
    assert values["penstock_database_up", ()] == 1
    assert "s3cret" not in done.stdout
