"""What a worker shows to the outside: metrics, liveness, readiness, and lines of its log."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from penstock import Penstock
from penstock.core import measuring
from penstock.core.measuring import measured
from penstock.core.meter import OTHERS, Meter
from penstock.core.tally import Tally
from penstock.errors import DatabaseUnavailable, InvalidInput
from penstock.http.metrics import Metrics
from penstock.jobs import claim_queries, worker_queries
from penstock.jobs.models import EnqueueOutcome
from penstock.jobs.records import JobCounts
from penstock.jobs.scaling import ScaleAdvice
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.worker import exposition
from penstock.worker.endpoint import Endpoint, parse_address
from penstock.worker.exposition import Exposition, Report, merged, report_of
from tests.chaos.proxy import Proxy
from tests.measured_worker import measured_worker, value_of
from tests.waiting import eventually
from tests.workers import Workers

SERIES = re.compile(r"^# TYPE (penstock_[a-z_]+) (?:counter|gauge)$", re.M)
NONE = dict.fromkeys([f"{end}_last_hour" for end in ("succeeded", "failed", "expired", "cancelled", "quarantined")], 0)
SECRET = "s3cret-in-the-payload"
SHOP = """
from penstock import Event, Penstock
from penstock.core.logs import get_logger

app = Penstock()
orders = app.stream("orders", partitions=2)


@app.job("mail")
async def mail(to: str) -> None:
    get_logger("penstock.shop").info("mailing")


@app.job("fail", max_attempts=1)
async def fail(to: str) -> None:
    raise ValueError(to)


@orders.consumer(group="billing")
async def bill(event: Event[dict]) -> None:
    pass
"""


async def test_a_worker_shows_its_jobs_and_streams_and_no_payload(app: Penstock, url: str, tmp_path: Path) -> None:
    with measured_worker(url, tmp_path, SHOP) as running:
        await eventually(lambda: running.get("/readyz").status_code == 200, "a worker that is ready", timeout=60)
        assert running.address.startswith("http://127.0.0.1:")
        for _ in range(3):
            await app.enqueue("mail", {"to": SECRET}, unique=SECRET)
        failing = await app.enqueue("fail", {"to": SECRET})
        await app.stream("orders").append({"card": SECRET}, key=SECRET)
        expected = {
            'penstock_jobs_settled_total{outcome="failed",type="fail"}': 1,
            'penstock_job_wait_seconds_count{outcome="failed",type="fail"}': 1,
            'penstock_job_run_seconds_count{outcome="failed",type="fail"}': 1,
            'penstock_events_handled_total{group="billing",stream="orders"}': 1,
            'penstock_slot_moves_total{group="orders/billing",how="gained"}': 2,
            'penstock_places{kind="async"}': 100,
            "penstock_database_up": 1,
        }
        for sample, value in expected.items():
            await eventually(lambda s=sample, v=value: running.value(s) == v, f"{sample} {value}", timeout=60)
        mailed = 'penstock_jobs_settled_total{outcome="succeeded",type="mail"}'
        await eventually(lambda: running.value(mailed) >= 1, "mails", timeout=60)
        text = running.get("/metrics").text
        for name in (
            "penstock_info", "penstock_claim_seconds_count", "penstock_claim_batch_jobs_count", "penstock_settle_seconds_count",
            "penstock_settle_batch_jobs_count", "penstock_loop_lag_seconds_count", "penstock_recovered_jobs_total",
            "penstock_stale_results_total", "penstock_places_used", "penstock_claim_loop_idle_seconds",
            "penstock_oldest_snapshot_seconds", "penstock_dead_rows", "penstock_table_bytes", "penstock_database_bytes",
            "penstock_stream_lag_events", "penstock_stream_lag_seconds", "penstock_quarantined_partitions",
        ):  # fmt: skip
            assert re.search(rf"^{name}[ {{]", text, re.M), f"{name} is missing"
        assert SECRET not in text
        assert running.get("/livez").text == "ok\n"
        assert running.get("/nothing").status_code == 404
        assert httpx.post(running.address + "/metrics").status_code == 405
        (failed,) = await eventually(
            lambda: [line for line in running.lines if line["event"] == "job_failed"], "the line of the failure", timeout=60
        )
        assert (failed["job_id"], failed["job_type"], failed["key"], failed["attempt"], failed["error_type"]) == (
            str(failing.id), "fail", None, 1, "ValueError",
        )  # fmt: skip
        mailing, *_ = await eventually(
            lambda: [line for line in running.lines if line["event"] == "mailing"], "the line of the handler"
        )
        assert (mailing["job_type"], mailing["attempt"]) == ("mail", 1)
        assert SECRET not in json.dumps(running.lines)


async def test_several_processes_have_one_endpoint_and_keep_the_counts_of_a_killed_one(
    app: Penstock, url: str, tmp_path: Path
) -> None:
    sample = 'penstock_jobs_settled_total{outcome="succeeded",type="mail"}'
    with measured_worker(url, tmp_path, SHOP, "--processes", "2") as running:
        await eventually(lambda: running.get("/readyz").status_code == 200, "workers that are ready", timeout=60)
        assert running.value('penstock_places{kind="async"}') == 200
        assert running.value("penstock_info{version=" + f'"{_version()}"' + "}") == 1
        for _ in range(20):
            await app.enqueue("mail", {"to": "ada"})
        await eventually(lambda: running.value(sample) == 20, "the sum over both", timeout=60)
        victim = int(running.workers[0].split(".")[-2])
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: len(running.workers) == 3, "a worker in the place of the killed one", timeout=60)
        await eventually(lambda: running.get("/readyz").status_code == 200, "workers that are ready again", timeout=60)
        assert running.value(sample) == 20


async def test_a_blocked_loop_is_not_live_and_its_metrics_are_still_there(
    app: Penstock, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "STALLED_S", 1.0)
    seen = threading.Event()
    codes: list[int] = []
    shown_meanwhile: list[str] = []

    @app.job("blocks")
    async def blocks() -> None:
        seen.wait(100)

    with measured() as meter:
        async with Workers(app) as workers:
            shown = Exposition(Database(url, app.settings), lambda: [report_of(meter, [workers.workers[0][0]])])
            endpoint = Endpoint(("127.0.0.1", 0), shown.routes, shown.close)
            address = f"http://127.0.0.1:{endpoint.port}"

            def watch() -> None:
                until = time.monotonic() + 90
                while not seen.is_set() and time.monotonic() < until:
                    codes.append(httpx.get(f"{address}/livez", timeout=60).status_code)
                    if codes[-1] == 503:
                        shown_meanwhile.append(httpx.get(f"{address}/metrics", timeout=60).text)
                        seen.set()

            watching = threading.Thread(target=watch)
            try:
                # Before the job, which may block this loop as soon as it is there.
                watching.start()
                await blocks.enqueue()
                await asyncio.to_thread(watching.join)
                assert codes[-1:] == [503]
                (text,) = shown_meanwhile
                idle = re.search(r"^penstock_claim_loop_idle_seconds (\S+)$", text, re.M)
                assert idle is not None and float(idle[1]) > 1.0
                assert re.search(r"^penstock_database_up 1\.0$", text, re.M), "what is read from the database is there too"
                async with httpx.AsyncClient() as client:

                    async def live() -> bool:
                        return (await client.get(f"{address}/livez", timeout=60)).status_code == 200

                    await eventually(live, "a live worker", timeout=60)
            finally:
                seen.set()
                await asyncio.to_thread(endpoint.close)


async def test_a_worker_without_a_database_is_live_and_not_ready(app: Penstock) -> None:
    stalled = Report(idle_s=1_000, running=True)
    nowhere = Database("postgresql://127.0.0.1:1/none", app.settings)
    without = Exposition(nowhere, lambda: [stalled])
    assert (await without.live()).status == 200
    assert (await without.ready()).status == 503
    assert b"penstock_database_up 0.0" in (await without.metrics()).body
    await without.close()
    of_database = Exposition(await app.database(), lambda: [stalled])
    assert (await of_database.live()).status == 503


async def test_probes_and_scrapes_are_answered_while_the_database_hangs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections stay open, and nothing comes back: no call ends, and neither does its cancellation."""
    monkeypatch.setattr(exposition, "ANSWER_S", 1.0)
    monkeypatch.setattr(exposition, "GAUGES_S", 1.0)
    settings = Settings(command_timeout=timedelta(hours=1), pool_size=1)
    async with Proxy(url) as proxy:
        shown = Exposition(Database(proxy.url, settings), lambda: [Report(idle_s=1_000, running=True)])
        assert (await shown.live()).status == 503
        assert (await shown.ready()).status == 200
        proxy.cut()
        async with asyncio.timeout(120):
            answers = await asyncio.gather(shown.metrics(), shown.live(), shown.ready(), shown.metrics())
            assert [answer.status for answer in answers] == [200, 200, 503, 200]
            assert b"penstock_database_up 0.0" in answers[0].body
            assert (await shown.live()).status == 200
        proxy.mend()

        async def ready() -> bool:
            return (await shown.ready()).status == 200

        await eventually(ready, "readiness", timeout=60)
        await shown.close()


async def test_readiness_waits_for_all_processes_and_ends_with_the_stop(app: Penstock) -> None:
    database = await app.database()
    running = Report(running=True)
    for reports, status in (([running], 503), ([running, Report()], 503), ([running] * 2, 200)):
        shown = Exposition(database, lambda reports=reports: reports, processes=lambda: 2)
        assert (await shown.ready()).status == status
    stopping = Exposition(database, lambda: [Report(running=True, stopping=True)])
    assert (await stopping.ready()).body == b"stopping\n"


async def test_lost_jobs_stale_results_and_errors_of_the_database_are_counted(
    app: Penstock, sql: asyncpg.Connection[Any]
) -> None:
    with measured() as meter:

        @app.job("slow")
        async def slow() -> None:
            if count(meter, "penstock_recovered_jobs_total"):
                return
            # Not claimed again, so that the result of this attempt meets a job that belongs to no worker.
            await sql.execute("select penstock.pause('slow')")
            await sql.execute("update penstock.leases set expires_at = now() - interval '1 second'")
            await eventually(lambda: count(meter, "penstock_recovered_jobs_total") >= 1, "a recovery", timeout=60)

        async with Workers(app):
            await slow.options(max_attempts=1).enqueue()
            await eventually(lambda: count(meter, "penstock_stale_results_total") >= 1, "a stale result", timeout=60)
        with pytest.raises(DatabaseUnavailable):
            nowhere = Database("postgresql://127.0.0.1:1/none", app.settings)
            await nowhere.open()
            await nowhere.fetch("select 1")
        assert count(meter, "penstock_database_errors_total") == 1


async def test_jobs_that_are_quarantined_without_a_worker_are_counted(app: Penstock, sql: asyncpg.Connection[Any]) -> None:
    database = await app.database()
    await sql.execute("select penstock.create_job_type('kill'), penstock.create_job_type('odd'), penstock.promise_to_begin('w')")
    await sql.execute("select penstock.promise_to_begin('v'), penstock.enqueue('kill', '1'), penstock.enqueue('kill', '2')")
    await sql.execute("select penstock.claim('w', '{kill}', 1), penstock.claim('v', '{kill}', 1)")
    # One of them has crashed two workers that ran nothing else, and does so now.
    await sql.execute("update penstock.queued_jobs set crashes = 3, lone_crashes = 2 where data = '1'")
    await sql.execute("update penstock.leases set expires_at = now() - interval '1 second'")
    await sql.execute("select penstock.enqueue('odd', '1')")
    await sql.execute("update penstock.queued_jobs set data = ('[' || repeat('1e131071,', 40) || '1]')::jsonb where name = 'odd'")
    with measured() as meter:
        assert await worker_queries.recover(database) == 2
        assert await claim_queries.quarantine_unreadable(database, ["odd"]) == 1
    quarantined = {
        sample.labels["type"]: sample.value
        for family in meter.registry.collect()
        for sample in family.samples
        if sample.name == "penstock_jobs_settled_total" and sample.labels["outcome"] == "quarantined"
    }
    assert quarantined == {"kill": 1, "odd": 1}


def test_blocks_that_overlap_measure_until_the_last_has_ended() -> None:
    first, second = measured(), measured()
    first.__enter__()
    meter = second.__enter__()
    first.__exit__(None, None, None)
    assert measuring.meter is meter
    second.__exit__(None, None, None)
    assert measuring.meter is None


def ready(waited_s: float = 0.0) -> tuple[datetime, datetime]:
    """The times of a job that could run `waited_s` ago."""
    at = datetime.now(UTC) - timedelta(seconds=waited_s)
    return at - timedelta(hours=1), at


def metered() -> tuple[Meter, Tally]:
    """A meter that follows a tally."""
    meter, tally = Meter(), Tally()
    meter.follow(tally)
    return meter, tally


def test_many_times_that_are_counted_together_are_all_counted() -> None:
    meter, tally = metered()
    started = time.monotonic()
    for number in range(1_001):
        tally.attempts("mail", "succeeded").ended(*ready(100.0), started, started + (0.002 if number else 20.0))
    values = {
        (sample.name, sample.labels.get("le")): sample.value for family in meter.registry.collect() for sample in family.samples
    }
    assert values["penstock_job_run_seconds_bucket", "0.0025"] == 1_000
    assert values["penstock_job_run_seconds_bucket", "+Inf"] == 1_001
    assert values["penstock_job_wait_seconds_bucket", "0.25"] == 0
    assert values["penstock_job_wait_seconds_count", None] == pytest.approx(1_001)


class Looked(datetime):
    """A time that counts how often it is converted."""

    looks = 0

    def timestamp(self) -> float:
        Looked.looks += 1
        return super().timestamp()


def test_of_many_attempts_that_end_together_few_waits_are_computed_and_stand_for_all() -> None:
    (meter, tally), at = metered(), Looked.now(UTC)
    for _ in range(500):
        tally.attempts("mail", "succeeded").ended(at, at, 0.0, 0.1)
    assert count(meter, "penstock_job_wait_seconds_count") == pytest.approx(500)
    assert Looked.looks < 64


def count(meter: Meter, sample: str) -> float:
    """The sum of a sample over its labels."""
    return sum(one.value for family in meter.registry.collect() for one in family.samples if one.name == sample)


def test_names_without_end_make_no_series_without_end() -> None:
    meter, tally = metered()
    job = ready()
    for number in range(200_000):
        tally.attempts(f"type-{number}", "succeeded").ended(*job, 0.0, 0.1)
    meter.fold()
    for number in range(5_000):
        name = f"name-{number}"
        meter.settled([name], [], 0.1)
        meter.appended(name, 1)
        meter.handled(name, name, 1)
        meter.moved(name, "gained", 1)
    for family in meter.registry.collect():
        of_label: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                of_label.setdefault(label, set()).add(value)
        assert all(len(values) <= 1_001 for values in of_label.values()), family.name
    runs = {
        s.labels["type"]: s.value
        for f in meter.registry.collect()
        for s in f.samples
        if s.name == "penstock_job_run_seconds_count"
    }
    assert (len(runs), sum(runs.values())) == (1_001, 200_000)
    assert runs[OTHERS] > 190_000


def test_a_server_too_has_a_bounded_number_of_series() -> None:
    metrics = Metrics()
    for number in range(20_000):
        name = f"name-{number}"
        metrics.enqueued(name, EnqueueOutcome.QUEUED)
        metrics.claimed(name, 1)
        metrics.meter.settled([name, name], [(name, "unknown")], 0.1)
        metrics.meter.appended(name, 1)
        metrics.read(name, "get", 1)
        metrics.published(name)
        metrics.delivered(name, "sse", 1)
    counts = [
        JobCounts(
            f"name-{number}",
            paused=number == 19_999,
            waiting=4,
            ready=1,
            deferred=2,
            in_progress=3,
            oldest_ready_s=float(number),
            **NONE,
        )
        for number in range(20_000)
    ]
    advice = [ScaleAdvice(f"name-{number}", 1, 1.0, 1.0, 1.0, 1, 1) for number in range(20_000)]
    text = metrics.exposition(metrics.asked(counts, advice, {f"pool-{number}": 1 for number in range(20_000)})).decode()
    for name in ("penstock_jobs_settled_total", "penstock_jobs_ready", "penstock_jobs_enqueued_total"):
        assert len(re.findall(rf"^{name}\{{", text, re.M)) == 1_001, name
    assert all(len(found) <= 1_001 for found in (re.findall(rf"^{name}\{{", text, re.M) for name in SERIES.findall(text)))
    # What shares a series is added up, or the largest counts.
    assert value_of(text, f'penstock_jobs_ready{{type="{OTHERS}"}}') == 19_000
    assert value_of(text, f'penstock_oldest_ready_seconds{{type="{OTHERS}"}}') == 19_999
    assert value_of(text, f'penstock_job_type_paused{{type="{OTHERS}"}}') == 1
    assert value_of(text, f'penstock_quarantined_keys{{type="{OTHERS}"}}') == 20_000
    assert value_of(text, "penstock_stale_results_total") == 20_000


def test_times_are_counted_as_they_were() -> None:
    meter, tally = metered()
    started = time.monotonic()
    waits, runs = (-5.0, 0.0005, 0.3, 0.4, 4.0, 100_000.0), (0.0005, 0.0015, 7_000.0, 7_201.0, 0.0, 3.0)
    for wait, run in zip(waits, runs, strict=True):
        tally.attempts("mail", "succeeded").ended(*ready(wait), started, started + run)
    tally.attempts("mail", "failed").ended(*ready(), started, started + 0.2)
    values = {
        (sample.name, sample.labels.get("outcome"), sample.labels.get("le")): sample.value
        for family in meter.registry.collect()
        for sample in family.samples
    }
    buckets = {"0.001": 2, "0.0025": 3, "5.0": 4, "7200.0": 5, "+Inf": 6}
    assert {bound: values["penstock_job_run_seconds_bucket", "succeeded", bound] for bound in buckets} == buckets
    assert values["penstock_job_run_seconds_sum", "succeeded", None] == pytest.approx(sum(runs))
    assert values["penstock_job_run_seconds_count", "failed", None] == 1
    waited = {"0.25": 2, "0.5": 4, "5.0": 5, "7200.0": 5, "+Inf": 6}
    assert {bound: values["penstock_job_wait_seconds_bucket", "succeeded", bound] for bound in waited} == waited
    assert values["penstock_job_wait_seconds_count", "failed", None] == 1
    assert values["penstock_job_wait_seconds_sum", "succeeded", None] == pytest.approx(100_004.7, abs=0.5)


def test_processes_are_added_up_and_versions_are_not() -> None:
    reports = []
    for seconds in (0.2, 20.0):
        meter, tally = metered()
        tally.attempts("mail", "succeeded").ended(*ready(), 0.0, seconds)
        meter.recovered(2)
        reports.append(list(meter.registry.collect()))
    values = {(sample.name, sample.labels.get("le")): sample.value for family in merged(reports) for sample in family.samples}
    assert values["penstock_recovered_jobs_total", None] == 4
    assert values["penstock_job_run_seconds_bucket", "1.0"] == 1
    assert values["penstock_job_run_seconds_bucket", "+Inf"] == 2
    assert values["penstock_job_run_seconds_sum", None] == pytest.approx(20.2)
    assert values["penstock_info", None] == 1


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9464", ("127.0.0.1", 9464)),
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_an_address_is_on_loopback_unless_a_host_is_named(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "here", ":http", ":70000", "host:"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not an address"):
        parse_address(text)


async def test_an_address_that_is_taken_is_an_error_that_names_it() -> None:
    shown = Exposition(Database("postgresql://127.0.0.1:1/none", Penstock().settings), list)
    first = Endpoint(("127.0.0.1", 0), shown.routes, shown.close)
    try:
        with pytest.raises(InvalidInput, match=f"127.0.0.1:{first.port}"):
            Endpoint(("127.0.0.1", first.port), shown.routes, shown.close)
    finally:
        first.close()


def _version() -> str:
    from penstock._version import __version__

    return __version__


def test_a_request_that_never_ends_does_not_keep_others_waiting() -> None:
    import socket

    shown = Exposition(Database("postgresql://127.0.0.1:1/none", Penstock().settings), lambda: [Report()])
    endpoint = Endpoint(("127.0.0.1", 0), shown.routes, shown.close)
    try:
        with socket.create_connection(("127.0.0.1", endpoint.port)) as silent:
            silent.sendall(b"GET /livez HTTP/1.1\r\n")
            assert httpx.get(f"http://127.0.0.1:{endpoint.port}/livez", timeout=60).status_code == 200
            silent.settimeout(60)
            began = time.monotonic()
            assert silent.recv(1) == b"", f"the connection stayed open for {time.monotonic() - began:.0f} s"
    finally:
        endpoint.close()
