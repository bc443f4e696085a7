"""Times in commands: each that is shown has its zone, and one without a zone is read in the zone that is shown."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock import Job, JobFilter, NewJob, Penstock
from penstock.testing import run_due_jobs
from tests.command_line import penstock

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
# A time of day, and what says its zone.
SHOWN = re.compile(r"\b\d\d:\d\d(?::\d\d)?(?:[.]\d+)?(?P<zone>[+-]\d\d:\d\d| UTC|Z)?(?!\d)")
MISSING, TWICE = (BERLIN, "2026-03-29 02:30"), (BERLIN, "2026-10-25T02:30")


async def _prepared(url: str) -> tuple[str, str]:
    """Something with a time in each list. Returns the ids of a job that failed and of one that waits for its time."""
    async with Penstock(url) as app:

        @app.job("ship", max_attempts=2)
        async def ship(job: Job[Any]) -> None:
            job.log("on its way")
            raise ValueError("the ship is away")

        failing = await app.enqueue("ship")
        await run_due_jobs(app)
        later = await app.enqueue("ship", run_after=timedelta(days=200), expires_at=timedelta(days=201))
        await app.operations.start("cancel", JobFilter(name="ship", until=(await app.find(failing.id)).created_at))
        return str(failing.id), str(later.id)


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK, "Asia/Kolkata"])
def test_each_time_that_a_command_shows_has_its_zone(url: str, zone: str) -> None:
    failing, later = asyncio.run(_prepared(url))
    penstock(url, "streams", "create", "orders")
    penstock(url, "streams", "append", "orders", "1", "--key", "a")
    with psycopg.connect(url) as connection:
        connection.execute("select penstock.declare_consumer_group('orders', 'billing')")
        connection.execute(
            "select penstock.declare_schedule('nightly', 'cron', '0 3 * * * UTC', clock_timestamp() + interval '1 day', 'job')"
        )
    penstock(url, "streams", "pause", "orders", "billing")
    penstock(url, "pause", "ship")
    penstock(url, "topics", "create", "news")
    penstock(url, "topics", "subscribe", "news", "bob", "--ttl", "1h")
    penstock(url, "topics", "publish", "news", "1")
    seen = {}
    for words in (
        f"jobs show {failing}", f"jobs show {later}", "jobs list", "types", "operations", "streams", "streams show orders",
        "streams lag orders", "streams groups orders", "topics", "topics subscribers news", "topics read news", "workers",
        "schedules", "pools", "doctor", "stats", "leaders", "users",
    ):  # fmt: skip
        done = penstock(url, *words.split(), TZ=zone)
        assert "Traceback" not in done.stderr, done.stderr
        found = list(SHOWN.finditer(done.stdout))
        seen[words] = len(found)
        assert [one[0] for one in found if not one["zone"]] == [], f"penstock {words}:\n{done.stdout}"
    assert sum(map(bool, seen.values())) > 7, seen


@pytest.mark.parametrize(("zone", "offset"), [(BERLIN, "+01:00"), (NEW_YORK, "-05:00"), (LORD_HOWE, "+11:00"), ("UTC", "+00:00")])
def test_the_scope_of_an_operation_is_read_in_the_zone_of_the_terminal_and_repeated_with_it(
    url: str, zone: str, offset: str
) -> None:
    penstock(url, "types", "create", "ship")
    penstock(url, "enqueue", "ship", "-f", "-", stdin='{"data": 1}\n{"data": 2}\n{"data": 3}\n')
    with psycopg.connect(url) as connection:
        for data, at in ((1, "15:29:59"), (2, "15:30:00"), (3, "16:00:00")):
            connection.execute(
                "update penstock.queued_jobs set created_at = %s where data = %s::jsonb", (f"2026-11-28 {at}{offset}", str(data))
            )
    scope = "--all-matching", "--since", "2026-11-28 15:30", "--until", "2026-11-28T16:00"
    said = f"since 2026-11-28 15:30:00{offset}, until 2026-11-28 16:00:00{offset}"
    for verb in ("cancel", "run-now", "set-priority --priority 5", "replay"):
        previewed = penstock(url, "jobs", *verb.split(), *scope, "--dry-run", TZ=zone)
        assert previewed.returncode == 0, previewed.stderr
        assert said in previewed.stdout
    as_json = json.loads(penstock(url, "jobs", "cancel", *scope, "--dry-run", "--json", TZ=zone).stdout)
    assert as_json["jobs"] == 1 and all(re.search(r"[+-]\d\d:\d\d$", as_json["filter"][name]) for name in ("since", "until"))
    started = penstock(url, "jobs", "cancel", *scope, TZ=zone)
    assert said in started.stdout
    assert said in penstock(url, "operations", TZ=zone).stdout
    with psycopg.connect(url) as connection:
        while connection.execute("select penstock.advance_operation(100)").fetchone() not in (None, (None,)):
            connection.commit()
            if connection.execute("select state from penstock.operations").fetchone() != ("running",):
                break
    left = {job["data"] for job in json.loads(penstock(url, "jobs", "list", "--status", "queued", "--json").stdout)}
    assert left == {1, 3}


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("jobs cancel --all-matching --dry-run", "--since"),
        ("jobs cancel --all-matching", "--until"),
        ("jobs replay --all-matching", "--since"),
        ("jobs run-now --all-matching", "--until"),
        ("jobs set-priority --priority 1 --all-matching", "--since"),
        ("enqueue ship", "--run-after"),
        ("enqueue ship", "--expires-at"),
        ("topics publish news", "--run-after"),
        ("topics publish news", "--expires-at"),
        ("streams tail orders", "--from"),
        ("streams reset orders billing", "--to"),
        ("streams reset orders billing --partition 0", "--to"),
    ],
)
def test_a_time_that_the_clocks_of_the_terminal_skip_or_show_twice_is_refused(url: str, words: str, option: str) -> None:
    for (zone, time), what in (
        (MISSING, "does not exist"),
        (TWICE, "happens twice"),
        ((LORD_HOWE, "2026-04-05 01:45"), "happens twice"),
    ):
        done = penstock(url, *words.split(), option, time, TZ=zone)
        said = re.sub(r"[\s│]+", " ", done.stderr)
        assert (done.returncode, what in said, "Traceback" in said) == (2, True, False), done.stderr
        assert len(re.findall(r"[+-]\d\d:\d\d\b", said.partition(": write")[2])) == 2, said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("enqueue ship", {"data": 1, "run_after": "2026-11-28T15:30:00"}),
        ("enqueue ship", {"data": 1, "expires_at": "2026-11-28 15:30"}),
        ("topics publish news", {"data": 1, "run_after": "2026-11-28"}),
        ("topics publish news", {"data": 1, "expires_at": "2026-11-28T15:30:00.25"}),
        ("streams append orders", {"data": 1, "time": "2026-11-28T15:30:00"}),
    ],
)
def test_a_time_in_a_file_that_has_no_zone_is_refused_wherever_the_terminal_is(
    url: str, tmp_path: Path, words: str, line: dict[str, Any]
) -> None:
    penstock(url, "types", "create", "ship")
    penstock(url, "topics", "create", "news")
    penstock(url, "streams", "create", "orders")
    field = next(name for name in line if name != "data")
    (tmp_path / "lines.ndjson").write_text(json.dumps(line) + "\n")
    done = penstock(url, *words.split(), "-f", str(tmp_path / "lines.ndjson"), TZ=BERLIN)
    assert done.returncode == 1
    assert f"line 1: {field} has no time zone: '{line[field]}'" in done.stderr and "2026-01-31T12:00:00Z" in done.stderr
    (tmp_path / "lines.ndjson").write_text(json.dumps(line | {field: "2026-11-28T15:30:00+01:00"}) + "\n")
    assert penstock(url, *words.split(), "-f", str(tmp_path / "lines.ndjson")).returncode == 0


def test_a_group_that_is_moved_to_a_time_says_to_which(url: str) -> None:
    penstock(url, "streams", "create", "orders")
    with psycopg.connect(url) as connection:
        connection.execute("select penstock.declare_consumer_group('orders', 'billing')")
    done = penstock(url, "streams", "reset", "orders", "billing", "--to", "2026-11-28 15:30", TZ=BERLIN)
    assert "from 2026-11-28 15:30:00+01:00 on" in done.stdout, done.stderr


async def test_a_time_for_a_job_is_read_in_the_zone_of_the_terminal(url: str, app: Penstock) -> None:
    await app.create_job_type("ship")
    await app.enqueue_many("ship", [NewJob("not shown")])
    enqueued = penstock(url, "enqueue", "ship", "1", "--run-after", "2096-07-01 12:00", "--json", TZ=BERLIN)
    record = await app.find(json.loads(enqueued.stdout)["id"])
    assert record.run_after.isoformat() == "2096-07-01T10:00:00+00:00"
    assert "2096-07-01 12:00:00+02:00" in penstock(url, "jobs", "show", str(record.id), TZ=BERLIN).stdout


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("words", ["gearman --server 127.0.0.1:9 --timeout", "bulk enqueue --type ship orders.parquet --rate"])
def test_an_option_that_is_a_number_is_a_finite_one(url: str, words: str, number: str) -> None:
    done = penstock(url, *words.split(), number)
    assert (done.returncode, "Invalid value for" in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
