"""A real Prometheus scrapes a worker, a server and a fleet on Spark under load: its alerts are silent, and each fires when its
cause is there."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest
import yaml

from penstock import Penstock
from penstock.testing import TemporaryDatabases
from tests.alert_rules import RULES
from tests.debian import find, missing
from tests.http.http_server import TOKEN, free_port, serving
from tests.measured_worker import measured_worker
from tests.waiting import eventually

pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(missing("prometheus")), reason=missing("prometheus"))]
SHOP = """
from penstock import Event, Job, Penstock


def nowhere(key, workers):
    raise KeyError(key)


app = Penstock()
routed = app.pool("routed", assign=nowhere)


@routed.job
async def route(job: Job[int]) -> None:
    pass


@app.stream("bad", partitions=1).consumer(group="audit", on_failure="quarantine")
async def audit(event: Event[int]) -> None:
    raise ValueError("no")


@app.job("mail")
async def mail(to: str) -> None:
    pass


@app.job("fail", max_attempts=1)
async def fail(to: str) -> None:
    raise ValueError("no")
"""
FLEET = """
from penstock import Penstock

app = Penstock()


@app.job("ship")
async def ship(to: str) -> None:
    pass
"""
CAUSED = {
    "PenstockNobodyWorks", "PenstockJobsWaiting", "PenstockJobsFailing", "PenstockJobsQuarantined", "PenstockJobsRecovered",
    "PenstockLagGrowing", "PenstockOldSnapshot", "PenstockLakeBehind", "PenstockNotificationsLost", "PenstockKeysQuarantined",
    "PenstockPartitionsQuarantined", "PenstockWorkflowStands", "PenstockPausedJobsWait",
}  # fmt: skip


class Prometheus:
    """A Prometheus with the rules of deploy/, which fire after a second instead of minutes."""

    def __init__(self, address: str, targets: Path) -> None:
        self.address = address
        self._targets = targets

    def scrape(self, **addresses: str) -> None:
        """Scrape these processes, by name."""
        groups = [{"targets": [urlsplit(url).netloc], "labels": {"instance": name}} for name, url in addresses.items()]
        part = self._targets.with_suffix(".part")
        part.write_text(json.dumps(groups))
        part.replace(self._targets)

    def query(self, expression: str) -> list[Any]:
        answer = httpx.get(f"{self.address}/api/v1/query", params={"query": expression}, timeout=60)
        found: list[Any] = answer.json()["data"]["result"]
        return found

    def up(self) -> set[str]:
        return {one["metric"]["instance"] for one in self.query("up == 1")}

    def firing(self) -> set[str]:
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.address}/-/ready", timeout=60).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def prometheus(folder: Path) -> Iterator[Prometheus]:
    rules = re.sub(r"for: \w+", "for: 1s", RULES.read_text())
    # What these measure cannot be made older than it is.
    for name, threshold, shorter in (
        # Longer than any transaction takes under load on a machine that is busy with other tests.
        ("penstock_oldest_snapshot_seconds) > ", "300", "40"),
        ("penstock_stream_lag_seconds) > ", "60", "10"),
        ("penstock_lake_behind_seconds) > ", "3600", "10"),
        ("penstock_workflow_tick_seconds) > ", "60", "10"),
    ):
        assert name + threshold in rules
        rules = rules.replace(name + threshold, name + shorter)
    (folder / "rules.yaml").write_text(rules)
    (folder / "targets.json").write_text("[]")
    config = {
        "global": {"scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "penstock",
                "basic_auth": {"username": "admin", "password": TOKEN},
                "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
            }
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    program = find("prometheus")
    assert program is not None
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield Prometheus(f"http://127.0.0.1:{port}", folder / "targets.json")
        finally:
            process.terminate()
            process.wait(60)


async def cause(app: Penstock, sql: asyncpg.Connection[Any]) -> None:
    """Cause what the alerts warn of, apart from what needs further processes."""
    # No worker works on the one type, and the pause of the other was forgotten; their jobs have waited for two hours.
    await sql.execute("select penstock.create_job_type('lonely'), penstock.enqueue('lonely', '1')")
    await sql.execute(
        "select penstock.create_job_type('forgotten'), penstock.enqueue('forgotten', '1'), penstock.pause('forgotten')"
    )
    await sql.execute(
        "update penstock.queued_jobs set created_at = created_at - interval '2 hours', run_after = run_after - interval '2 hours'"
        " where name in ('lonely', 'forgotten')"
    )
    for _ in range(20):
        await app.enqueue("fail", {"to": "ada"})
    # A payload that does not fit the handler is quarantined.
    await sql.execute("select penstock.enqueue('mail', '[1, 2]')")
    # A worker claims a job and is gone.
    await sql.execute("select penstock.create_job_type('lost'), penstock.enqueue('lost', '1')")
    await sql.execute("select penstock.claim('gone', '{lost}', 1)")
    await sql.execute("update penstock.leases set expires_at = now() - interval '1 second' where worker = 'gone'")
    await sql.execute("select penstock.pause('lost')")
    # An event whose handler fails, and a key for which the rule of its pool fails.
    await sql.execute("select penstock.append('bad', '1')")
    await (await app.find_pool("routed")).enqueue("acme", 1)
    # A lake that nothing is written to, though jobs finish.
    await sql.execute("select penstock.open_lake('lake', 'file:///nowhere')")


@asynccontextmanager
async def unreachable(databases: TemporaryDatabases, url: str) -> AsyncIterator[None]:
    """No client reaches this database while the block lasts."""
    name = urlsplit(url).path[1:]
    await databases.execute(f'alter database "{name}" allow_connections false')
    try:
        await databases.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")
        yield
    finally:
        await databases.execute(f'alter database "{name}" allow_connections true')


async def test_alerts_are_silent_under_load_and_fire_for_what_they_warn_of(
    databases: TemporaryDatabases, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with databases.database() as url, serving(url) as server, prometheus(tmp_path) as watching:
        first = measured_worker(url, tmp_path_factory.mktemp("first"), SHOP)
        on_spark = ("--on", "spark", "--workers", "2", "--type", "ship", "--ship", ".")
        # It listens where no notification arrives, as behind a pooler in transaction mode.
        elsewhere = databases.server_url
        second = measured_worker(url, tmp_path_factory.mktemp("second"), SHOP, PENSTOCK_LISTEN_URL=elsewhere)
        with first as worker, measured_worker(url, tmp_path_factory.mktemp("fleet"), FLEET, *on_spark) as fleet:
            for process in (worker, fleet):
                await eventually(lambda p=process: p.get("/readyz").status_code == 200, "workers that are ready", timeout=120)
            await eventually(watching.ready, "Prometheus", timeout=120)
            async with Penstock(url) as app:
                scraped = {"worker": worker.address, "server": server.base_url, "fleet": fleet.address}
                watching.scrape(**scraped)
                loading = asyncio.create_task(_load(app))
                held: list[str] = []
                watching_sessions = asyncio.create_task(_note_old_transactions(url, held))
                try:
                    await eventually(lambda: watching.up() == scraped.keys(), "all processes scraped", timeout=120)
                    for process, kind in (("worker", "mail"), ("fleet", "ship")):
                        of = f'instance="{process}",type="{kind}",outcome="succeeded"'
                        settled = f"penstock_jobs_settled_total{{{of}}} > 500"
                        await eventually(lambda s=settled: watching.query(s), f"a load of the {process}", timeout=120)
                    assert watching.query("count_over_time(ALERTS[1h])") == [], held
                    watching_sessions.cancel()

                    sql = await asyncpg.connect(url)
                    old = await asyncpg.connect(url)
                    await cause(app, sql)
                    transaction = old.transaction(isolation="repeatable_read")
                    await transaction.start()
                    await old.fetch("select 1 from penstock.jobs")
                    # What follows from the seal of a job group is not resolved.
                    await old.fetch("select pg_advisory_xact_lock(hashtext('penstock.resolve_workflows'))")
                    await sql.execute("select penstock.seal_group(penstock.open_group('import'))")
                    await sql.execute("select penstock.create_stream('orders')")
                    await sql.execute("select penstock.declare_consumer_group('orders', 'billing')")
                    with second as deaf:
                        watching.scrape(**scraped, deaf=deaf.address)

                        async def all_fire() -> bool:
                            await sql.execute("select penstock.append('orders', '1')")
                            return watching.firing() >= CAUSED

                        try:
                            await eventually(all_fire, "all alerts", timeout=240)
                        finally:
                            print("firing:", sorted(watching.firing()), "missing:", sorted(CAUSED - watching.firing()))
                        assert watching.firing() == CAUSED
                    await transaction.rollback()
                    await eventually(lambda: "PenstockOldSnapshot" not in watching.firing(), "the end of an alert", timeout=120)
                    await old.close()
                    await sql.close()
                    loading.cancel()
                    async with unreachable(databases, url):
                        await eventually(lambda: "PenstockDatabaseDown" in watching.firing(), "the last alert", timeout=120)
                    await eventually(lambda: "PenstockDatabaseDown" not in watching.firing(), "its end", timeout=120)
                finally:
                    loading.cancel()
                    watching_sessions.cancel()
                    await asyncio.gather(loading, watching_sessions, return_exceptions=True)


async def _load(app: Penstock) -> None:
    while True:
        for _ in range(20):
            await app.enqueue("mail", {"to": "ada"})
            await app.enqueue("ship", {"to": "ada"})
        await asyncio.sleep(0.2)


async def _note_old_transactions(url: str, held: list[str]) -> None:
    """Note each second what has been open for more than five, which says why there are alerts where none should be."""
    connection = await asyncpg.connect(url)
    try:
        while True:
            rows = await connection.fetch(
                "select clock_timestamp() - xact_start as age, state, wait_event, query from pg_stat_activity"
                " where datname = current_database() and xact_start < clock_timestamp() - interval '5 seconds'"
            )
            held += [str(dict(row)) for row in rows]
            await asyncio.sleep(1)
    finally:
        connection.terminate()
