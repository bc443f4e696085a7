"""The metrics of a worker through OpenTelemetry are those of its scrape: the same names, labels and values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from penstock import Penstock
from tests.measured_worker import Running, measured_worker
from tests.waiting import eventually

SECRET = "s3cret-in-the-payload"
SHOP = """
import json
import os
from pathlib import Path

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from penstock import Event, Penstock

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
app = Penstock()
orders = app.stream("orders", partitions=2)


@app.job("mail")
async def mail(to: str) -> None:
    pass


@app.job("fail", max_attempts=1)
async def fail(to: str) -> None:
    raise ValueError(to)


@orders.consumer(group="billing")
async def bill(event: Event[dict]) -> None:
    pass


@app.job("tell")
def tell(name: str) -> None:
    found = []
    for of_resource in reader.get_metrics_data().resource_metrics:
        for of_scope in of_resource.scope_metrics:
            if of_scope.scope.name != "penstock":
                continue
            for metric in of_scope.metrics:
                for point in metric.data.data_points:
                    kind = type(metric.data).__name__, getattr(metric.data, "is_monotonic", None)
                    found.append([metric.name, kind, dict(point.attributes), point.value])
    Path(os.environ["TOLD"], name + ".part").write_text(json.dumps(found))
    Path(os.environ["TOLD"], name + ".part").rename(Path(os.environ["TOLD"], name))
"""
VARYING = re.compile(
    "penstock_(job_(wait|run)|claim|settle|loop_lag)_seconds|penstock_(claim|settle)_batch|penstock_claim_loop_idle|penstock_places_used"
    "|penstock_(database|table)_bytes|penstock_dead_rows|penstock_oldest_snapshot"
)
"""Metrics whose values move on between a scrape and an export."""
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def ready(running: Running) -> None:
    await eventually(lambda: running.get("/readyz").status_code == 200, "a worker that is ready", timeout=60)


def exported(told: Path) -> Series:
    return {(name, tuple(sorted(labels.items()))): value for name, _, labels, value in json.loads(told.read_text())}


def scraped(text: str) -> Series:
    found: Series = {}
    for line in text.splitlines():
        if sample := re.match(r"(penstock_[a-z_]+)(?:\{(.*)\})? (\S+)$", line):
            found[sample[1], tuple(sorted(re.findall(r'(\w+)="([^"]*)"', sample[2] or "")))] = float(sample[3])
    return found


def settled(series: Series) -> Series:
    return {key: value for key, value in series.items() if not VARYING.match(key[0]) and ("type", "tell") not in key[1]}


async def test_an_export_has_the_names_labels_and_values_of_a_scrape(app: Penstock, url: str, tmp_path: Path) -> None:
    with measured_worker(url, tmp_path, SHOP, PENSTOCK_OTEL_METRICS="1", TOLD=str(tmp_path)) as running:
        await ready(running)
        for _ in range(3):
            await app.enqueue("mail", {"to": SECRET})
        await app.enqueue("fail", {"to": SECRET})
        await app.stream("orders").append({"card": SECRET}, key=SECRET)
        for sample, value in {
            'penstock_jobs_settled_total{outcome="succeeded",type="mail"}': 3,
            'penstock_jobs_settled_total{outcome="failed",type="fail"}': 1,
            'penstock_events_handled_total{group="billing",stream="orders"}': 1,
            'penstock_stream_lag_events{group="billing",stream="orders"}': 0,
        }.items():
            await eventually(lambda s=sample, v=value: f"\n{s} {v}.0\n" in running.get("/metrics").text, sample)

        async def told(name: str) -> Path:
            await app.enqueue("tell", {"name": name})
            await eventually((tmp_path / name).exists, "an export")
            return tmp_path / name

        await told("first")
        told_once = 'penstock_jobs_settled_total{outcome="succeeded",type="tell"} 1.0'
        await eventually(lambda: told_once in running.get("/metrics").text, "the settlement of the first export")
        again = await told("again")
        text = running.get("/metrics").text
    found, shown = exported(again), scraped(text)
    assert found.keys() == shown.keys()
    assert settled(found) == settled(shown)
    assert found["penstock_jobs_settled_total", (("outcome", "failed"), ("type", "fail"))] == 1
    # Each export reads once more: the first of these jobs is settled in the second one.
    succeeded = "penstock_jobs_settled_total", (("outcome", "succeeded"), ("type", "tell"))
    assert (exported(tmp_path / "first")[succeeded], found[succeeded]) == (0, 1)
    assert SECRET not in again.read_text()


async def test_counters_are_counters_and_the_parts_of_histograms_keep_their_names(
    app: Penstock, url: str, tmp_path: Path
) -> None:
    with measured_worker(url, tmp_path, SHOP, PENSTOCK_OTEL_METRICS="1", TOLD=str(tmp_path)) as running:
        await ready(running)
        for name in ("first", "second"):
            await app.enqueue("tell", {"name": name})
            await eventually((tmp_path / name).exists, "an export")
    kinds = {name: tuple(kind) for name, kind, *_ in json.loads((tmp_path / "second").read_text())}
    assert kinds["penstock_jobs_settled_total"] == ("Sum", True)
    assert kinds["penstock_job_run_seconds_bucket"] == kinds["penstock_job_run_seconds_count"] == ("Sum", False)
    assert kinds["penstock_places"] == ("Gauge", None)


async def test_without_a_provider_a_worker_says_so_and_works(app: Penstock, url: str, tmp_path: Path) -> None:
    plain = SHOP.replace("metrics.set_meter_provider(", "str(")
    with measured_worker(url, tmp_path, plain, PENSTOCK_OTEL_METRICS="1") as running:
        await ready(running)
        job = await app.enqueue("mail", {"to": "ada"})
        await app.wait(job.id)

        def said() -> list[dict[str, Any]]:
            return [line for line in running.lines if line["event"] == "no_meter_provider"]

        (line,) = await eventually(said, "a warning")
    assert "opentelemetry-instrument" in line["hint"]
