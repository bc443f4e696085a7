"""The driver of two queries is killed with SIGKILL between any two steps of both; everything counts once in the end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import Program

from penstock.lake import Lake

Ask = Callable[..., list[Any]]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def test_queries_whose_driver_is_killed_between_any_two_steps_count_everything_once(
    url: str, ask: Ask, archive: Any, tmp_path: Path
) -> None:
    ask("select penstock.create_stream(name, 3) from unnest('{a,b}'::text[]) as name")
    ask(
        "select count(*) from penstock.append_many('a', array(select json_build_object('n', n) from generate_series(1, 110) n),"
        " array(select 'k' || n % 7 from generate_series(1, 110) n))"
    )
    for _ in range(6):
        archive(25)
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
    appended = ask(
        "select (e.data ->> 'n')::integer as n from penstock.stream_bounds('b') bounds"
        " cross join lateral penstock.read_events('b', bounds.partition, 0, 1000) e"
    )
    assert sorted(row["n"] for row in appended) == list(range(1, 111))
    lake = Lake("main", str(tmp_path / "lake"))
    paths = [row["path"] for row in ask("select path from penstock.lake_files where kind = 'jobs'")]
    ids = lake.table(paths, columns=["id"])["id"].to_pylist()
    assert sorted(ids) == sorted(str(row["id"]) for row in ask("select id from penstock.archived_jobs"))
    assert ask("select sum(succeeded)::integer as jobs from penstock.rollups")[0]["jobs"] == 150
    assert list((tmp_path / "lake" / "_staging").iterdir()) == []
