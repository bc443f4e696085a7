"""Schedules and tasks of the leader are declared at deployment, as all objects are, and not by what merely enqueues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import InvalidInput, LeaderTask, Penstock, Schedule, Tick
from penstock.schedules.times import Every
from penstock.testing import running_worker
from tests.command_line import penstock
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
SHOP = """
from datetime import timedelta
from penstock import Penstock

app = Penstock()


@app.job
async def ship(id: str) -> None: ...


@app.cron("0 4 * * *", tz="Europe/Berlin", max_attempts=2)
async def report() -> None: ...


@app.timer(every=timedelta(seconds=5), as_job=False)
async def beat() -> None: ...


@app.timer(every=timedelta(seconds=5), per_worker=True)
async def pulse() -> None: ...


@app.on_leader
async def follow_prices() -> None: ...
"""


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "deployed_shop.py").write_text(SHOP)
    yield tmp_path


async def declared(sql: Sql) -> dict[str, tuple[str, ...]]:
    """What the database has of schedules, their types and tasks."""
    schedules = await sql.fetch("select name, runs_as from penstock.schedules order by name")
    return {
        "schedules": tuple(f"{name} {runs_as}" for name, runs_as in schedules),
        "types": tuple(row["name"] for row in await sql.fetch("select name from penstock.jobs order by name")),
        "leaders": tuple(row["name"] for row in await sql.fetch("select name from penstock.leader_tasks")),
    }


async def test_a_deployment_declares_schedules_and_tasks_of_the_leader(url: str, sql: Sql, shop: Path) -> None:
    said = penstock(url, "declare", "deployed_shop:app", "--json", cwd=shop).stdout
    expected = ["job ship", "job report", "schedule report", "schedule beat", "schedule pulse", "leader follow-prices"]
    assert json.loads(said) == expected
    found = {
        "schedules": ("beat in-place", "pulse per-worker", "report job"),
        "types": ("report", "ship"),
        "leaders": ("follow-prices",),
    }
    assert await declared(sql) == found
    due = await sql.fetchval("select next_at from penstock.schedules where name = 'report'")
    assert await sql.fetchval("select max_attempts from penstock.jobs where name = 'report'") == 2
    # A further deployment changes nothing.
    assert json.loads(penstock(url, "declare", "deployed_shop:app", "--json", cwd=shop).stdout) == expected
    assert await declared(sql) == found
    assert await sql.fetchval("select next_at from penstock.schedules where name = 'report'") == due


def objects(app: Penstock) -> tuple[Any, Schedule, LeaderTask]:
    """A job, a schedule and a task, as an application declares them."""

    @app.job
    async def ship(id: str) -> None: ...

    @app.timer(every=timedelta(hours=1))
    async def tidy() -> None: ...

    @app.on_leader
    async def follow_prices() -> None: ...

    return ship, tidy, follow_prices


@pytest.mark.parametrize("opened", [True, False])
async def test_a_process_that_enqueues_declares_no_schedule(url: str, sql: Sql, opened: bool) -> None:
    web = Penstock(url)
    ship, _, _ = objects(web)
    try:
        if opened:
            await web.open()
        await ship.enqueue(id="shp_1")
        found = await declared(sql)
        assert (found["schedules"], found["leaders"]) == ((), ())
    finally:
        await web.close()


async def test_each_object_can_be_declared_by_itself(app: Penstock, sql: Sql) -> None:
    _, tidy, follow_prices = objects(app)
    await tidy.declare()
    assert await declared(sql) == {"schedules": ("tidy job",), "types": ("tidy",), "leaders": ()}
    await follow_prices.declare()
    assert (await declared(sql))["leaders"] == ("follow-prices",)
    assert [(task.name, task.state, task.leader) for task in await app.leaders()] == [("follow-prices", "waiting", None)]


async def test_a_declared_schedule_begins_at_the_deployment_and_a_worker_goes_on_with_it(app: Penstock, sql: Sql) -> None:
    ticks: list[Tick] = []
    app.timer(every=timedelta(hours=1), name="tidy", missed="once")(lambda tick: ticks.append(tick))
    await app.declare()
    # The first time passes before any worker runs.
    await sql.execute("update penstock.schedules set next_at = next_at - interval '5 hours'")
    due = await sql.fetchval("select next_at + interval '4 hours' from penstock.schedules")
    async with running_worker(app):
        await eventually(lambda: ticks, "the run for the latest time that was missed")
    assert ticks[0].at == due


async def test_other_times_begin_the_schedule_again(app: Penstock, url: str, sql: Sql) -> None:
    app.timer(every=timedelta(hours=1), name="tidy")(lambda: None)
    await app.declare()
    other = Penstock(url)
    other.timer(every=timedelta(minutes=1), name="tidy")(lambda: None)
    async with other:
        await other.declare()
    spec, soon = await sql.fetchrow("select spec, next_at < now() + interval '2 minutes' from penstock.schedules")
    assert (spec, soon) == ("60", True)


async def test_what_belongs_to_no_application_cannot_be_declared() -> None:
    async def follow() -> None: ...

    with pytest.raises(InvalidInput, match="schedule tidy belongs to no application"):
        await Schedule("tidy", Every(timedelta(hours=1)), lambda: None, "skip").declare()
    with pytest.raises(InvalidInput, match="task follow belongs to no application"):
        await LeaderTask("follow", follow).declare()
