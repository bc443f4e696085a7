"""The metrics that documents and dashboards rely on are there, in workers and in servers, under the names of docs/metrics.md."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock import Penstock
from penstock.testing import TemporaryDatabases
from tests.http.http_server import serving
from tests.http.stream_requests import append, create
from tests.measured_worker import Running, measured_worker, value_of
from tests.waiting import eventually

DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
SHOP = """
from penstock import Event, Penstock

app = Penstock()
orders = app.stream("orders", partitions=2)
shipments = app.pool("shipments", slots=4)


@app.job("mail")
async def mail(to: str) -> None:
    await orders.append({"to": to})


@shipments.job
async def ship(to: str) -> None:
    pass


@orders.consumer(group="billing")
async def bill(event: Event[dict]) -> None:
    pass
"""
OF_JOBS = {"penstock_job_wait_seconds_count", "penstock_job_run_seconds_count"}
"""A server runs no jobs: there these have no samples."""
EVERYWHERE = OF_JOBS | {
    "penstock_jobs_settled_total", "penstock_recovered_jobs_total", "penstock_stale_results_total",
    "penstock_claim_seconds_count", "penstock_claim_batch_jobs_count", "penstock_settle_seconds_count",
    "penstock_settle_batch_jobs_count", "penstock_places", "penstock_places_used", "penstock_loop_lag_seconds_count",
    "penstock_database_errors_total", "penstock_events_appended_total", "penstock_events_handled_total",
    "penstock_slot_moves_total", "penstock_database_up", "penstock_oldest_snapshot_seconds", "penstock_replication_slot_bytes",
    "penstock_database_bytes", "penstock_dead_rows", "penstock_table_bytes", "penstock_stream_lag_events",
    "penstock_stream_lag_seconds", "penstock_quarantined_partitions", "penstock_notifications_arrive",
    "penstock_lake_behind_seconds", "penstock_info",
}  # fmt: skip
TITLES = ("Of every process", "Of a worker", "Of the database", "Of the HTTP server")


@pytest.fixture(scope="module")
def scrapes(databases: TemporaryDatabases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a worker and a server show after each has done some of everything."""
    with databases.database() as url, serving(url) as server, server.client() as client:
        folder = tmp_path_factory.mktemp("shop")
        with measured_worker(url, folder, SHOP) as worker:
            asyncio.run(_work(url, client, worker))
            yield {"worker": worker.get("/metrics").text, "server": client.get("/metrics").text}


async def _work(url: str, client: httpx.Client, worker: Running) -> None:
    body = {"name": "print", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
    made = [client.post("/v1/jobs", json=body), client.put("/v1/jobs/print/random_id", json={"data": {}})]
    claimed = client.post("/v1/jobs/print/claim", json={"worker": "w", "limit": 1}).json()["jobs"]
    held = [{"id": job["id"], "attempt": job["attempt"], "lease": job["lease"], "outcome": "succeeded"} for job in claimed]
    made.append(client.post("/v1/jobs/print/settle", json={"jobs": held}))
    stream = create(client)
    append(client, stream, 1)
    append(client, stream, 2)
    member = f"/v1/streams/{stream}/groups/g/members/m"
    session = client.put(member, json={}).json()["session"]
    (batch,) = client.post(f"{member}/read", json={"session": session}).json()["batches"]
    commit = {field: batch[field] for field in ("partition", "epoch", "revision", "next_offset")}
    made.append(client.post(f"{member}/commit", json={"commits": [commit]}))
    assert [answer.text for answer in made if answer.status_code >= 300] == []
    async with Penstock(url) as app:
        await (await app.database()).fetch("select penstock.open_lake('lake', 'file:///nowhere')")
        await app.enqueue("mail", {"to": "ada"})
        handled = 'penstock_events_handled_total{group="billing",stream="orders"}'
        await eventually(lambda: worker.value(handled) == 1, "an event that was handled", timeout=60)
        lag = "penstock_loop_lag_seconds_count"
        await eventually(lambda: value_of(client.get("/metrics").text, lag) > 0, "a look at the loop of the server", timeout=60)


def samples(text: str) -> dict[str, int]:
    """Of each name the number of its samples."""
    return Counter(re.match(r"[a-z_]+", line)[0] for line in text.splitlines() if not line.startswith("#"))  # type: ignore[index]


@pytest.mark.parametrize("process", ["worker", "server"])
def test_a_process_shows_what_every_process_shows(scrapes: dict[str, str], process: str) -> None:
    found = samples(scrapes[process])
    wanted = EVERYWHERE if process == "worker" else EVERYWHERE - OF_JOBS
    assert sorted(name for name in wanted if not found[name]) == []
    for name in OF_JOBS:
        assert f"# TYPE {name.removesuffix('_count')} histogram" in scrapes[process]
    assert not any(name.endswith("_created") for name in found)


def test_waits_and_runs_are_counted_by_outcome(scrapes: dict[str, str]) -> None:
    for name in OF_JOBS:
        assert value_of(scrapes["worker"], f'{name}{{outcome="succeeded",type="mail"}}') == 1


def test_a_server_counts_what_was_settled_appended_and_handled_through_it(scrapes: dict[str, str]) -> None:
    text = scrapes["server"]
    (stream,) = re.findall(r'penstock_events_handled_total\{group="g",stream="(.*)"\}', text)
    for sample in (
        'penstock_jobs_settled_total{outcome="succeeded",type="print"} 1.0',
        f'penstock_events_appended_total{{stream="{stream}"}} 2.0',
        f'penstock_events_handled_total{{group="g",stream="{stream}"}} 2.0',
        f'penstock_slot_moves_total{{group="{stream}/g",how="gained"}} 1.0',
        "penstock_settle_batch_jobs_sum 1.0",
        "penstock_claim_batch_jobs_sum 1.0",
    ):
        assert f"\n{sample}\n" in text, sample
    assert len(re.findall(r"^# TYPE penstock_jobs_settled_total ", text, re.M)) == 1


def test_the_document_has_every_metric_and_no_other(scrapes: dict[str, str]) -> None:
    sections = DOCUMENT.split("\n## ")
    of = {title: next(part for part in sections if part.startswith(title)) for title in TITLES}
    documented = {title: set(re.findall(r"`(penstock_[a-z_]+)`", _first_columns(of[title]))) for title in TITLES}
    shown = {process: set(re.findall(r"^# TYPE (penstock_[a-z_]+) ", text, re.M)) for process, text in scrapes.items()}
    everywhere = documented["Of every process"] | documented["Of the database"]
    assert shown["worker"] == everywhere | documented["Of a worker"]
    assert shown["server"] == everywhere | documented["Of the HTTP server"]


def _first_columns(section: str) -> str:
    return "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
