"""The metrics that documents and dashboards rely on are there, in workers and in servers, under the names of docs/metrics.md."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock import Penstock
from penstock.testing import TemporaryDatabases
from tests.alert_rules import RULES, promtool_test, rules, series_of
from tests.debian import find, missing
from tests.http.http_server import serving
from tests.http.stream_requests import append, create
from tests.measured_worker import Running, measured_worker, value_of
from tests.waiting import eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCUMENT = (DEPLOY.parent / "docs" / "metrics.md").read_text()
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
    "penstock_lake_behind_seconds", "penstock_info", "penstock_job_groups", "penstock_waiting_jobs",
    "penstock_workflow_tick_seconds",
}  # fmt: skip
TITLES = ("Of every process", "Of a worker", "Of the database", "Of the HTTP server")


@pytest.fixture(scope="module")
def scrapes(databases: TemporaryDatabases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a worker and a server show after each has done some of everything."""
    with databases.database() as url, serving(url) as server, server.client() as client:
        folder = tmp_path_factory.mktemp("shop")
        with measured_worker(url, folder, SHOP) as worker:
            asyncio.run(_work(url, client, worker))
            found = {"worker": worker.get("/metrics").text, "server": client.get("/metrics").text}
        with measured_worker(url, folder, SHOP, "--processes", "2") as workers:
            asyncio.run(_work_more(url, workers))
            yield {**found, "processes": workers.get("/metrics").text}


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


async def _work_more(url: str, workers: Running) -> None:
    async with Penstock(url) as app:
        await eventually(lambda: workers.get("/readyz").status_code == 200, "both processes", timeout=120)
        await app.enqueue("mail", {"to": "ada"})
        for sample in (
            'penstock_events_handled_total{group="billing",stream="orders"}',
            'penstock_job_run_seconds_count{outcome="succeeded",type="mail"}',
        ):
            await eventually(lambda s=sample: workers.value(s) == 1, sample, timeout=60)
        await eventually(lambda: workers.value("penstock_loop_lag_seconds_count") > 0, "a look at a loop", timeout=60)


def samples(text: str) -> dict[str, int]:
    """Of each name the number of its samples."""
    return Counter(re.match(r"[a-z_]+", line)[0] for line in text.splitlines() if not line.startswith("#"))  # type: ignore[index]


@pytest.mark.parametrize("process", ["worker", "processes", "server"])
def test_a_process_shows_what_every_process_shows(scrapes: dict[str, str], process: str) -> None:
    found = samples(scrapes[process])
    wanted = EVERYWHERE - OF_JOBS if process == "server" else EVERYWHERE
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
    assert shown["worker"] == shown["processes"] == everywhere | documented["Of a worker"]
    assert shown["server"] == everywhere | documented["Of the HTTP server"]


def _first_columns(section: str) -> str:
    return "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))


def used_names() -> dict[str, set[str]]:
    """The metrics that the alert rules and the dashboard name, each with the labels by which it is selected or grouped."""
    board = json.loads((DEPLOY / "grafana" / "penstock.json").read_text())
    expressions = [rule["expr"] for rule in rules()]
    expressions += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    found: dict[str, set[str]] = {}
    for expression in expressions:
        for name, selected in re.findall(r"(penstock_[a-z_]+)(?:\{([^}]*)\})?", expression):
            found.setdefault(name, set()).update(re.findall(r"([a-z]+) *=", selected))
        if len(names := set(re.findall(r"penstock_[a-z_]+", expression))) == 1:
            grouped = {label.strip() for by in re.findall(r"by \(([a-z, ]+)\)", expression) for label in by.split(",")}
            found[names.pop()].update(grouped - {"instance"})
    return found


@pytest.mark.parametrize("name", sorted(used_names()))
def test_what_alerts_and_dashboards_name_is_in_a_scrape(scrapes: dict[str, str], name: str) -> None:
    # Of what has no sample here (a pool whose rule fails) the family is declared.
    shown = [text for text in scrapes.values() if re.search(rf"^{name}[ {{]|^# TYPE {name} ", text, re.M)]
    assert shown, f"{name} is in no scrape"
    in_workers = [scrapes[process] in shown for process in ("worker", "processes")]
    assert in_workers[0] == in_workers[1], f"{name} is not the same with one worker process and with several"
    lines = [line for text in shown for line in re.findall(rf"^{name}\{{(.*)\}} ", text, re.M)]
    for label in used_names()[name] if lines else ():
        assert all(re.search(rf'(^|,){label}="', line) for line in lines), f"{name} has no label {label}"


needs_promtool = pytest.mark.skipif(bool(missing("promtool")), reason=missing("promtool"))
LONG = "+0x120"
CAUSES = {
    "PenstockNobodyWorks": {'penstock_scale_ready{type="mail"}': f"3{LONG}", 'penstock_scale_workers{type="mail"}': f"0{LONG}"},
    "PenstockJobsWaiting": {'penstock_queueing_delay_seconds{type="mail"}': "0+60x120"},
    "PenstockPausedJobsWait": {
        'penstock_job_type_paused{type="mail"}': f"1{LONG}",
        'penstock_oldest_ready_seconds{type="mail"}': "0+60x120",
    },
    "PenstockJobsFailing": {
        'penstock_jobs_settled_total{type="mail",outcome="retried"}': "0+2x120",
        'penstock_jobs_settled_total{type="mail",outcome="succeeded"}': "0+1x120",
    },
    "PenstockJobsQuarantined": {'penstock_jobs_settled_total{type="mail",outcome="quarantined"}': "0+0x100 1+0x20"},
    "PenstockKeysQuarantined": {'penstock_quarantined_keys{type="orders"}': f"1{LONG}"},
    "PenstockPartitionsQuarantined": {'penstock_quarantined_partitions{stream="s",group="g"}': f"1{LONG}"},
    "PenstockJobsRecovered": {"penstock_recovered_jobs_total": "0+0x115 2+0x5"},
    "PenstockLagGrowing": {
        'penstock_stream_lag_seconds{stream="s",group="g"}': "0+60x120",
        'penstock_stream_lag_events{stream="s",group="g"}': "0+10x120",
    },
    "PenstockWorkflowStands": {"penstock_workflow_tick_seconds": "0+60x120"},
    "PenstockOldSnapshot": {"penstock_oldest_snapshot_seconds": "0+60x120"},
    "PenstockLakeBehind": {'penstock_lake_behind_seconds{lake="lake"}': "0+60x120"},
    "PenstockNotificationsLost": {'penstock_notifications_arrive{instance="w"}': f"0{LONG}"},
    "PenstockDatabaseDown": {"penstock_database_up": f"0{LONG}"},
}
"""Series with which an alert fires, in the place of those that were scraped of the same metrics."""
NEAR_MISSES = {
    "no worker, but no job that waits": {
        'penstock_scale_ready{type="mail"}': f"0{LONG}", 'penstock_scale_workers{type="mail"}': f"0{LONG}",
    },
    "a pause of four minutes": {
        'penstock_job_type_paused{type="mail"}': f"1{LONG}", 'penstock_oldest_ready_seconds{type="mail"}': "0+0x116 0+60x4",
    },
    "a third of the attempts fails": {
        'penstock_jobs_settled_total{type="mail",outcome="retried"}': "0+1x120",
        'penstock_jobs_settled_total{type="mail",outcome="succeeded"}': "0+2x120",
    },
    "few attempts, which all fail": {'penstock_jobs_settled_total{type="mail",outcome="failed"}': "0+0x110 1+0x5 2+0x5"},
    "a lag that shrinks": {
        'penstock_stream_lag_seconds{stream="s",group="g"}': f"600{LONG}",
        'penstock_stream_lag_events{stream="s",group="g"}': "10000-10x120",
    },
    "ends that are resolved after half a minute": {"penstock_workflow_tick_seconds": f"30{LONG}"},
    "a transaction of four minutes": {"penstock_oldest_snapshot_seconds": "0+0x116 0+60x4"},
    "a worker that starts": {'penstock_jobs_settled_total{type="mail",outcome="quarantined"}': "_x110 0+0x10"},
}  # fmt: skip


def with_cause(healthy: dict[str, str], cause: dict[str, str]) -> dict[str, str]:
    names = {series.partition("{")[0] for series in cause}
    return {series: values for series, values in healthy.items() if series.partition("{")[0] not in names} | cause


@needs_promtool
def test_the_rules_are_well_formed(tmp_path: Path) -> None:
    promtool = find("promtool")
    assert promtool is not None
    done = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {rule["alert"] for rule in rules()} == set(CAUSES)
    # The example of a configuration, with a token that is there.
    config = (RULES.parent / "prometheus.yaml").read_text().replace("/etc/prometheus/penstock.token", str(tmp_path / "token"))
    (tmp_path / "token").write_text("secret")
    (tmp_path / "prometheus.yaml").write_text(config)
    (tmp_path / RULES.name).write_text(RULES.read_text())
    checked = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yaml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert all({"summary", "action"} <= set(rule["annotations"]) for rule in rules())


@needs_promtool
@pytest.mark.soak
def test_alerts_fire_for_their_cause_alone(scrapes: dict[str, str], tmp_path: Path) -> None:
    named = {name for rule in rules() for name in re.findall("penstock_[a-z_]+", rule["expr"])}
    healthy = {series: values for series, values in series_of(scrapes).items() if series.partition("{")[0] in named}
    assert {series.partition("{")[0] for series in healthy} >= named - {"penstock_quarantined_keys"}
    quiet = [(healthy, [])] + [(with_cause(healthy, near), []) for near in NEAR_MISSES.values()]
    loud = [(with_cause(healthy, cause), [name]) for name, cause in CAUSES.items()]
    begins = {'penstock_jobs_settled_total{type="mail",outcome="quarantined"}': "_x100 1+0x20"}
    loud.append((with_cause(healthy, begins), ["PenstockJobsQuarantined"]))
    assert promtool_test(tmp_path, [*quiet, *loud]) == ""


@needs_promtool
@pytest.mark.soak
def test_promtool_says_when_an_alert_does_not_fire(tmp_path: Path) -> None:
    assert "PenstockDatabaseDown" in promtool_test(tmp_path, [({"penstock_database_up": f"1{LONG}"}, ["PenstockDatabaseDown"])])
