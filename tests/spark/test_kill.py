"""The driver of two queries is killed with SIGKILL, between any two steps and anywhere; everything counts once in the end."""

from __future__ import annotations

import os
import random
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.history.lake import Lake
from tests.spark.programs import Program

Ask = Callable[..., list[Any]]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def prepare(ask: Ask, archive: Any, events: int, jobs: int) -> None:
    """A stream to be copied, and jobs of which history is to be made."""
    ask("select penstock.create_stream(name, 3) from unnest('{a,b}'::text[]) as name")
    ask(
        "select count(*) from penstock.append_many('a', array(select json_build_object('n', n)"
        " from generate_series(1, $1::integer) n), array(select 'k' || n % 7 from generate_series(1, $1) n))",
        events,
    )
    for _ in range(jobs // 25):
        archive(25)


def check_everything_counts_once(ask: Ask, folder: Path, events: int, jobs: int) -> None:
    appended = ask(
        "select (e.data ->> 'n')::integer as n from penstock.stream_bounds('b') bounds"
        " cross join lateral penstock.read_events('b', bounds.partition, 0, 1000) e"
    )
    assert sorted(row["n"] for row in appended) == list(range(1, events + 1))
    lake = Lake("main", str(folder / "lake"))
    paths = [row["path"] for row in ask("select path from penstock.lake_files where kind = 'jobs'")]
    ids = lake.table(paths, columns=["id"])["id"].to_pylist()
    assert len(ids) == jobs
    assert sorted(ids) == sorted(str(row["id"]) for row in ask("select id from penstock.archived_jobs"))
    assert ask("select sum(succeeded)::integer as jobs from penstock.rollups")[0]["jobs"] == jobs
    assert list((folder / "lake" / "_staging").iterdir()) == []


def test_queries_whose_driver_is_killed_between_any_two_steps_count_everything_once(
    url: str, ask: Ask, archive: Any, tmp_path: Path
) -> None:
    prepare(ask, archive, 110, 150)
    # A life for each step, and one to the end: a JVM each, so both queries die in the same ones, and the next one starts early.
    steps = ("1", "2", "3", "4", "5", "none")
    drivers: list[Program] = []
    try:
        for place, step in enumerate(steps):
            for soon in steps[len(drivers) : place + 2]:
                drivers.append(Program.driver(tmp_path / f"{soon}.log", "both", url, str(tmp_path), soon))
            (tmp_path / f"begin {step}").touch()
            driver = drivers[place]
            code = driver.process.wait(timeout=240)
            driver.kill()
            assert code == (0 if step == "none" else -signal.SIGKILL), f"step {step}: {driver.log.read_text()[-3000:]}"
    finally:
        for driver in drivers:
            driver.kill()
    check_everything_counts_once(ask, tmp_path, 110, 150)


@pytest.mark.soak
def test_queries_whose_driver_is_killed_anywhere_count_everything_once(url: str, ask: Ask, archive: Any, tmp_path: Path) -> None:
    """The moment of each kill is the first or second change of something that one of the queries does, drawn by lot."""
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    chance = random.Random(seed)
    events, jobs, kills = 120, 150, 2
    prepare(ask, archive, events, jobs)

    def files(folder: str, pattern: str) -> Callable[[], int]:
        return lambda: sum(1 for _ in (tmp_path / folder).rglob(pattern))

    def of_database(query: str) -> Callable[[], int]:
        return lambda: int(ask(query)[0][0] or 0)

    copied = of_database("select sum(next_offset) from penstock.stream_bounds('b')")
    kept = of_database("select sum(rows) from penstock.lake_files where kind = 'jobs'")
    of_the_copy = {
        "batches planned": files("checkpoint/offsets", "[0-9]*"),
        "rows staged": of_database("select count(*) from penstock.staged_events"),
        "events copied": copied,
        "batches noted as done": files("checkpoint/commits", "[0-9]*"),
    }
    of_history = {"files written aside": files("lake/_staging", "*.parquet"), "jobs kept": kept}
    drivers: list[Program] = []

    def start(life: str) -> None:
        drivers.append(Program.driver(tmp_path / f"{life}.log", "both", url, str(tmp_path), life))

    lives = [*(f"life {number}" for number in range(kills)), "last life"]
    try:
        start(lives[0])
        for place, life in enumerate(lives[:-1]):
            # A JVM takes long to start: the next one waits already.
            start(lives[place + 1])
            driver = drivers[place]
            # Each batch is 20 events or 30 jobs; what is drawn has to come before the work is done.
            things = {**(of_the_copy if events - copied() >= 60 else {}), **(of_history if jobs - kept() >= 90 else {})}
            if place > 0 and not things:
                print(f"{life} is left out: little is left to be interrupted")
                continue
            thing, changes = chance.choice(sorted(things)), chance.randint(1, 2)
            print(f"{life} ends with change {changes} of {thing}")
            seen = [things[thing]()]

            def over(count: Callable[[], int] = things[thing], seen: list[int] = seen, changes: int = changes) -> bool:
                if (now := count()) != seen[-1]:
                    seen.append(now)
                return len(seen) > changes

            (tmp_path / f"begin {life}").touch()
            driver.until(over, f"change {changes} of {thing}")
            assert driver.process.poll() is None, driver.log.read_text()[-3000:]
            driver.kill()
            print(f"{copied()} events copied, {kept()} jobs kept")
        (tmp_path / f"begin {lives[-1]}").touch()
        assert drivers[-1].process.wait(timeout=240) == 0, drivers[-1].log.read_text()[-3000:]
    finally:
        for driver in drivers:
            driver.kill()
    check_everything_counts_once(ask, tmp_path, events, jobs)
