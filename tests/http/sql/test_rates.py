"""The rates by minute: processes add what they counted, rows are bounded in number and age."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from penstock import Penstock

Sql = asyncpg.Connection


def rates(*names: str, succeeded: int = 1, **given: Any) -> str:
    buckets = [0.0] * 19
    one = {
        "succeeded": succeeded,
        "failed": 1, "retried": 0, "others": 0, "waits": [float(succeeded), *buckets[1:]], "runs": buckets,
        "wait_s": 0.5, "run_s": 0.0,
    }  # fmt: skip
    return json.dumps([{"name": name, **one, **given} for name in names])


async def test_processes_add_to_the_same_minute_and_quarter(app: Penstock, sql: Sql, url: str) -> None:
    other = await asyncpg.connect(url)
    names = [f"t{number}" for number in range(200)]
    try:
        for _ in range(5):
            # In either order: they must not wait for each other.
            await asyncio.gather(
                sql.fetch("select penstock.note_rates($1)", rates("", *names)),
                other.fetch("select penstock.note_rates($1)", rates(*reversed(names), "", succeeded=2)),
            )
    finally:
        await other.close()
    for wide in (False, True):
        found = await sql.fetch("select * from penstock.rates_of(array['t7', 't8'], $1)", wide)
        assert sum(row["succeeded"] for row in found) == 30 and sum(row["waits"][0] for row in found) == 30.0
        assert sum(row["wait_s"] for row in found) == pytest.approx(10.0) and all(len(row["runs"]) == 19 for row in found)
        assert sum(row["succeeded"] for row in await sql.fetch("select * from penstock.rates_of(null, $1)", wide)) == 15
    # The sum of all is no type, also when it is asked for by its name.
    assert await sql.fetch("select * from penstock.rates_of(array[''])") == []
    by_type = await sql.fetch("select * from penstock.type_rates(array['t1', '', 'gone'])")
    assert [(row["name"], row["succeeded"], row["failed"]) for row in by_type] == [("t1", 15, 10)]
    assert len(await sql.fetch("select * from penstock.type_rates(p_limit => 150)")) == 150


async def test_old_rates_go_with_the_next_write(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.note_rates($1)", rates("", "a"))
    await sql.execute(
        """
        insert into penstock.rates (name, wide, at, succeeded, failed, retried, others, waits, runs, wait_s, run_s)
        select rate.name, rate.wide, rate.at - age, 1, 0, 0, 0, rate.waits, rate.runs, 0, 0
        from penstock.rates as rate, unnest(array['115 minutes', '125 minutes', '25 hours', '27 hours']::interval[]) as age
        """
    )
    await sql.execute("select penstock.note_rates($1)", rates("", "a"))
    ages = await sql.fetch(
        "select wide, count(distinct at) as parts, max(penstock.clock() - at) < interval '26 hours 16 minutes' as young"
        " from penstock.rates group by wide order by wide"
    )
    # Of minutes the one of now and that of 115 minutes ago; of quarters all that are younger than 26 hours.
    assert [(row["wide"], row["young"]) for row in ages] == [(False, True), (True, True)]
    assert await sql.fetchval("select count(*) from penstock.rates where not wide and at < now() - interval '2 hours'") == 0
    assert await sql.fetchval("select count(*) from penstock.rates where wide and at < now() - interval '24 hours'") == 2
    assert [row["succeeded"] for row in await sql.fetch("select * from penstock.rates_of()")][-1] >= 1


async def test_a_quarter_has_a_bounded_number_of_types(app: Penstock, sql: Sql) -> None:
    for part in range(4):
        await sql.execute("select penstock.note_rates($1)", rates("", *(f"t{part}-{number}" for number in range(1000))))
    await sql.execute("select penstock.note_rates($1)", rates("", "t0-0", "t3-999"))
    # At the turn of a quarter the types of both count.
    quarters = await sql.fetchval("select count(distinct at) from penstock.rates where wide")
    assert await sql.fetchval("select count(*) from penstock.rates where wide") <= quarters * 3_002
    assert await sql.fetchval("select sum(succeeded) from penstock.rates where wide and name <> ''") == 4_002
    assert await sql.fetchval("select sum(succeeded) from penstock.rates where not wide and name <> ''") == 4_002


@pytest.mark.parametrize(
    "given",
    [
        "{}", "[1]", "null", rates(*map(str, range(1003))), rates("a", succeeded=-1), rates("a", waits=[1.0]),
        rates("a", runs=None), rates("a", runs=[None] * 19), rates("a", runs=[-1.0] * 19), rates("a" * 301),
        rates("a", failed="many"), rates("a", "a"),
    ],
)  # fmt: skip
async def test_what_no_process_counts_is_refused(app: Penstock, sql: Sql, given: str) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute("select penstock.note_rates($1)", given)
    assert refused.value.sqlstate == "PS400"
    assert await sql.fetchval("select count(*) from penstock.rates") == 0
