"""The key of a run: by a rule at the schedule's declaration, or given when the schedule is run by hand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import InvalidInput, Penstock, Tick
from penstock.testing import run_due_jobs, running_worker
from tests.command_line import penstock
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


def day(tick: Tick) -> str:
    return f"{tick.name} {tick.at:%Y-%m-%d}"


@pytest.mark.parametrize(("key", "expected"), [("name", lambda at: "report"), (day, lambda at: f"report {at:%Y-%m-%d}")])
async def test_the_job_of_a_run_has_the_key_of_the_declared_rule(
    app: Penstock, sql: Sql, key: str | Callable[[Tick], str], expected: Callable[[datetime], str]
) -> None:
    ticks: list[Tick] = []
    app.timer(every=timedelta(milliseconds=200), name="report", key=key)(lambda tick: ticks.append(tick))
    async with running_worker(app):
        await eventually(lambda: ticks, "a run at its time")
    archived = {
        row["key"]
        for row in await sql.fetch("select key from penstock.archived_jobs union all select key from penstock.queued_jobs")
    }
    assert archived <= {expected(ticks[0].at), expected(datetime.now(UTC))}, archived


async def test_a_run_by_hand_has_the_key_of_the_rule_or_that_of_the_call(app: Penstock, url: str, sql: Sql) -> None:
    app.cron("0 4 * * *", name="report", key=day)(lambda: None)
    await app.declare()

    began = datetime.now(UTC)

    async def key_of(id: Any) -> str | None:
        await run_due_jobs(app)
        return (await app.find(id)).key

    def of_the_rule() -> set[str]:
        # Midnight may have passed.
        return {f"report {at:%Y-%m-%d}" for at in (began, datetime.now(UTC))}

    assert await key_of(await app.run_schedule("report")) in of_the_rule()
    assert await key_of(await app.run_schedule("report", key="by hand")) == "by hand"
    assert await key_of((await app.enqueue("report", {})).id) in of_the_rule()
    assert await key_of(await sql.fetchval("select penstock.run_schedule('report')")) is None
    assert await key_of(await sql.fetchval("select penstock.run_schedule('report', 'in SQL')")) == "in SQL"
    penstock(url, "schedules", "run", "report", "--key", "in a shell")
    [ran] = await run_due_jobs(app)
    assert ran.key == "in a shell"


def test_a_rule_is_checked_where_the_schedule_is_declared() -> None:
    app = Penstock("postgresql://localhost/nowhere")
    with pytest.raises(InvalidInput, match="key of schedule report is 'nam', and Tick has no such field") as refused:
        app.cron("0 4 * * *", name="report", key="nam")(lambda: None)
    assert "name" in (refused.value.hint or "")
    with pytest.raises(InvalidInput, match="schedule beat runs in place and cannot have options of jobs, such as key"):
        app.timer(every=timedelta(seconds=5), name="beat", key="name", as_job=False)(lambda: None)


async def test_a_run_in_place_has_no_key(app: Penstock) -> None:
    app.timer(every=timedelta(hours=1), name="beat", as_job=False)(lambda: None)
    await app.declare()
    with pytest.raises(InvalidInput, match="a run of schedule beat is no job, and has no key"):
        await app.run_schedule("beat", key="acme")
