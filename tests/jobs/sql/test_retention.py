"""Retention by outcome: each retention class has partitions of its own, which are dropped as a whole when their time has come."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest
import uuid_utils

from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
CLASSES = (1, 3, 7, 30, 90, 365)
# On a loaded machine a test may hold its lock for longer than prune waits. The server finds a circle after a second in any case.
PATIENT = "alter function penstock.prune(interval, integer) set lock_timeout = '60s'"


async def at(sql: Sql, moment: datetime) -> None:
    await sql.execute("select set_config('penstock.clock', $1, false)", moment.isoformat())


def id_at(moment: datetime) -> UUID:
    """A UUIDv7 of this time, as a client with the right clock makes it."""
    return UUID(str(uuid_utils.uuid7(nanoseconds=int(moment.timestamp()) * 10**9)))


async def enqueue(sql: Sql, name: str, id: UUID) -> None:
    await sql.execute("select penstock.enqueue($1, p_id => $2)", name, id)


async def settle(sql: Sql, id: UUID, name: str, outcome: str = "succeeded") -> None:
    await enqueue(sql, name, id)
    (job,) = await sql.fetch("select id, attempt, lease from penstock.claim('w', array[$1], 1)", name)
    assert job["id"] == id
    await sql.fetch(
        "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array[$4])",
        id, job["attempt"], job["lease"], outcome,
    )  # fmt: skip


async def partition_of(sql: Sql, id: UUID) -> str | None:
    found: str | None = await sql.fetchval("select tableoid::regclass::text from penstock.archived_jobs where id = $1", id)
    return None if found is None else found.removeprefix("penstock.")


async def create(sql: Sql, name: str, succeeded: int | None, failed: int | None) -> None:
    spans = {"keep_succeeded": succeeded, "keep_failed": failed}
    options = {option: None if days is None else f"{days} days" for option, days in spans.items()}
    await sql.execute("select penstock.create_job_type($1, $2::jsonb)", name, json.dumps(options))


@pytest.fixture
async def bill(sql: Sql) -> str:
    await at(sql, START)
    await create(sql, "bill", 3, 365)
    return "bill"


@pytest.mark.parametrize(
    ("span", "days"),
    [
        (None, 0), ("1 second", 1), ("1 day", 1), ("25 hours", 3), ("3 days", 3), ("4 days", 7), ("1 week", 7), ("8 days", 30),
        ("1 month", 30), ("31 days", 90), ("91 days", 365), ("365 days", 365), ("1 year", 365),
    ],
)  # fmt: skip
async def test_a_span_is_rounded_up_to_the_next_class(sql: Sql, span: str | None, days: int) -> None:
    assert await sql.fetchval("select penstock.retention_class($1::text::interval)", span) == days


async def test_the_classes_of_the_table_are_those_of_the_function(sql: Sql) -> None:
    for (days,) in await sql.fetch("select keep from penstock.retention_classes where keep > 0"):
        assert await sql.fetchval("select penstock.retention_class($1)", timedelta(days=days)) == days


@pytest.mark.parametrize("outcome", ["succeeded", "failed-for-good", "cancelled", "quarantined"])
async def test_a_settled_job_is_in_the_class_of_its_outcome(sql: Sql, bill: str, outcome: str) -> None:
    id = uuid4()
    await settle(sql, id, bill, outcome)
    assert await partition_of(sql, id) == (
        "archived_jobs_k3_p20260101" if outcome == "succeeded" else "archived_jobs_k365_p20251206"
    )


async def test_jobs_that_never_ran_are_in_the_class_of_failures(sql: Sql, bill: str) -> None:
    cancelled, expired = uuid4(), uuid4()
    await enqueue(sql, bill, cancelled)
    await sql.execute("select penstock.cancel($1)", cancelled)
    await sql.execute("select penstock.enqueue($1, p_id => $2, p_expires_at => $3)", bill, expired, START + timedelta(minutes=1))
    await at(sql, START + timedelta(minutes=2))
    await sql.execute("select penstock.expire()")
    assert {await partition_of(sql, id) for id in (cancelled, expired)} == {"archived_jobs_k365_p20251206"}


async def test_a_job_that_its_handler_finishes_is_in_the_class_of_successes(sql: Sql, bill: str) -> None:
    id = uuid4()
    await enqueue(sql, bill, id)
    (job,) = await sql.fetch("select * from penstock.claim('w', array['bill'], 1)")
    await sql.execute("select penstock.finish($1, $2::smallint, $3)", id, job["attempt"], job["lease"])
    assert await partition_of(sql, id) == "archived_jobs_k3_p20260101"


async def test_a_type_without_keep_is_in_the_class_that_prune_decides(sql: Sql) -> None:
    await at(sql, START)
    await create(sql, "ship", None, None)
    await create(sql, "mail", None, 7)
    jobs = [("ship", "succeeded"), ("ship", "failed-for-good"), ("mail", "succeeded"), ("mail", "failed-for-good")]
    found = []
    for name, outcome in jobs:
        id = uuid4()
        await settle(sql, id, name, outcome)
        found.append(await partition_of(sql, id))
    assert found == ["archived_jobs_p20260101"] * 3 + ["archived_jobs_k7_p20260101"]


async def test_a_change_of_keep_holds_for_the_jobs_of_the_next_claim(sql: Sql, bill: str) -> None:
    held, later = uuid4(), uuid4()
    await enqueue(sql, bill, held)
    (job,) = await sql.fetch("select * from penstock.claim('w', array['bill'], 1)")
    await sql.execute("select penstock.change_job_type('bill', '{\"keep_succeeded\": \"20 days\"}')")
    await sql.fetch("select * from penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint])", held, job["lease"])
    await settle(sql, later, bill)
    assert [await partition_of(sql, id) for id in (held, later)] == ["archived_jobs_k3_p20260101", "archived_jobs_k30_p20251230"]


async def test_a_batch_of_several_types_is_settled_into_the_class_of_each(sql: Sql, bill: str) -> None:
    await create(sql, "ship", None, None)
    await create(sql, "mail", 1, 1)
    for name in ("bill", "ship", "mail"):
        await enqueue(sql, name, uuid4())
    jobs = await sql.fetch("select id, lease from penstock.claim('w', array['bill', 'ship', 'mail'], 10)")
    await sql.fetch(
        "select * from penstock.settle($1::uuid[], array_fill(1::smallint, array[3]), $2::bigint[])",
        [job["id"] for job in jobs], [job["lease"] for job in jobs],
    )  # fmt: skip
    found = await sql.fetch("select name, keep from penstock.archived_jobs order by name")
    assert [tuple(row) for row in found] == [("bill", 3), ("mail", 1), ("ship", 0)]


async def test_each_class_is_dropped_when_its_time_has_come_and_not_before(sql: Sql) -> None:
    await at(sql, START)
    for days in CLASSES:
        await create(sql, f"k{days}", days, days)
        await settle(sql, uuid4(), f"k{days}")
    await create(sql, "ship", None, None)
    await settle(sql, uuid4(), "ship")
    dropped: dict[int, int] = {}
    for day in range(1, 400):
        await at(sql, START + timedelta(days=day))
        for row in await sql.fetch("select * from penstock.prune('10 days')"):
            if row["jobs"]:
                dropped[int(row["partition"].partition("_k")[2].partition("_")[0] or 0)] = day
    assert set(dropped) == {0, *CLASSES}
    lengths = dict(await sql.fetch("select keep, days from penstock.retention_classes"))
    for days, day in dropped.items():
        assert (days or 10) < day <= (days or 10) + lengths[days], f"class {days} was dropped on day {day}"
    assert await sql.fetchval("select count(*) from penstock.archived_jobs") == 0


async def test_prune_without_a_span_drops_only_what_says_how_long_it_is_kept(sql: Sql, bill: str) -> None:
    await create(sql, "ship", None, None)
    for name in ("bill", "ship"):
        await settle(sql, uuid4(), name)
    await at(sql, START + timedelta(days=2000))
    assert [tuple(row) for row in await sql.fetch("select * from penstock.prune()") if row["jobs"]] == [
        ("archived_jobs_k3_p20260101", 1)
    ]
    assert await sql.fetchval("select string_agg(name, ' ') from penstock.archived_jobs") == "ship"


@pytest.mark.parametrize("days", [60, pytest.param(450, marks=pytest.mark.soak)])
async def test_no_class_has_many_partitions_however_long_it_runs(sql: Sql, days: int) -> None:
    await at(sql, START)
    for kept in CLASSES:
        await create(sql, f"k{kept}", kept, kept)
    most: Counter[int] = Counter()
    for day in range(days):
        await at(sql, START + timedelta(days=day))
        await sql.execute("select penstock.ensure_archive(penstock.clock() + interval '1 day')")
        await sql.fetch("select * from penstock.prune('30 days')")
        if day % 10 == 0 or day > days - 20:
            # Without those of the day on which the test runs.
            near = "where day <= penstock.clock() + interval '1 day'"
            for keep, count in await sql.fetch(f"select keep, count(*) from penstock.archive_leaves() {near} group by keep"):
                most[keep] = max(most[keep], count)
    bounds = {0: 34, 1: 3, 3: 5, 7: 9, 30: 13, 90: 16, 365: 15}
    assert all(count <= bounds[keep] for keep, count in most.items()), most


@pytest.mark.parametrize("outcome", ["succeeded", "failed-for-good"])
@pytest.mark.parametrize("version", [4, 7])
async def test_an_id_that_is_archived_in_any_class_is_not_enqueued_again(sql: Sql, bill: str, outcome: str, version: int) -> None:
    id = uuid4() if version == 4 else id_at(START)
    await settle(sql, id, bill, outcome)
    await at(sql, START + timedelta(days=2))
    await create(sql, "other", 90, 1)
    await enqueue(sql, bill, id)
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0
    assert await sql.fetchval("select status from penstock.find_jobs(array[$1::uuid])", id) == outcome.removesuffix("-for-good")
    assert await sql.fetch("select penstock.list_jobs($1)", bill) == [(id,)]
    replay = uuid4()
    assert await sql.fetchval("select penstock.replay($1, $2)", id, replay) == replay


async def test_the_look_for_a_new_id_reads_the_partitions_of_the_last_days_alone(sql: Sql, bill: str) -> None:
    for day in range(120):
        await sql.execute("select penstock.ensure_archive($1)", START + timedelta(days=day))
    floor = START + timedelta(days=118)
    plan = "\n".join(
        line
        for (line,) in await sql.fetch(
            f"explain select id from penstock.archived_jobs where finished_at >= '{floor}'::timestamptz order by id desc limit 1"
        )
    )
    read = set(re.findall(r" on (archived_jobs\w*_p[0-9]{8})\b", plan))
    assert read == {
        name for (name,) in await sql.fetch("select relation from penstock.archive_leaves() where until > $1", floor.date())
    }
    # Two days of class 0 and of class 3, a month or two of class 365; and the two of the day on which the test runs.
    assert len(read) <= 8 < await sql.fetchval("select count(*) from penstock.archive_leaves()") / 20, plan


async def test_readers_in_commit_order_see_every_class(sql: Sql, bill: str) -> None:
    before = await sql.fetchval("select pg_current_snapshot()::text")
    ids = {uuid4(): outcome for outcome in ("succeeded", "failed-for-good")}
    for id, outcome in ids.items():
        await settle(sql, id, bill, outcome)
    low, high = (int(text.split(":")[0]) for text in (before, await sql.fetchval("select pg_current_snapshot()::text")))
    counts = await sql.fetch(
        "select * from penstock.archive_counts('{}', $1::text::xid8, $2::text::xid8, '{}', null, null, 100)", str(low), str(high)
    )
    assert sum(row["jobs"] for row in counts) == 2
    parts = await sql.fetch("select relation from penstock.archive_blocks() where blocks > 0")
    seen = [await sql.fetch(await sql.fetchval("select penstock.scan($1, '{id}')", relation)) for (relation,) in parts]
    assert {UUID(row["id"]) for rows in seen for row in rows} == set(ids)
    assert {relation for (relation,) in parts} == {"archived_jobs_k3_p20260101", "archived_jobs_k365_p20251206"}


async def commit_to_lake(sql: Sql, batch: int, files: dict[str, int]) -> None:
    """What the history pipeline does after it has written the files: the manifest and the position in one transaction."""
    await sql.execute(
        "select penstock.commit_lake_batch('lake', $1, pg_current_snapshot()::text, $2, $3::jsonb, '[]', '[]', '[]')",
        batch,
        sum(files.values()),
        json.dumps([
            {"kind": "jobs", "day": day, "type": "bill", "path": f"{batch}-{day}", "rows": rows, "bytes": 1}
            for day, rows in files.items()
        ]),
    )  # fmt: skip


async def test_a_class_is_dropped_only_when_the_lake_has_its_jobs_whatever_was_dropped_of_their_day(sql: Sql, bill: str) -> None:
    await sql.execute("select penstock.open_lake('lake', 'file:///lake')")
    for outcome in ("succeeded", "succeeded", "failed-for-good"):
        await settle(sql, uuid4(), bill, outcome)
    await at(sql, START + timedelta(days=5))
    assert [row for row in await sql.fetch("select * from penstock.prune('30 days')") if row["jobs"]] == []
    await commit_to_lake(sql, 0, {"2026-01-01": 3})
    assert await dropped(sql) == {"archived_jobs_k3_p20260101": 2}
    # The other class of the same day, of which the lake has three jobs and the archive one.
    await at(sql, START + timedelta(days=420))
    assert await dropped(sql) == {"archived_jobs_k365_p20251206": 1}
    assert [tuple(row) for row in await sql.fetch("select day::text, jobs from penstock.pruned_days order by day")] == [
        ("2025-12-06", 1),
        ("2026-01-01", 2),
    ]


async def dropped(sql: Sql) -> dict[str, int]:
    return {row["partition"]: row["jobs"] for row in await sql.fetch("select * from penstock.prune('30 days')") if row["jobs"]}


async def test_a_job_that_is_archived_late_keeps_its_partition_until_the_lake_has_it(sql: Sql, bill: str) -> None:
    await sql.execute("select penstock.open_lake('lake', 'file:///lake')")
    await settle(sql, uuid4(), bill)
    # More files than jobs: the number of rows alone would not tell.
    await commit_to_lake(sql, 0, {"2026-01-01": 10})
    await settle(sql, uuid4(), bill)
    await at(sql, START + timedelta(days=5))
    assert await dropped(sql) == {}
    await commit_to_lake(sql, 1, {"2026-01-01": 1})
    assert await dropped(sql) == {"archived_jobs_k3_p20260101": 2}


async def test_a_lake_whose_manifest_lost_its_files_keeps_the_partition(sql: Sql, bill: str) -> None:
    await sql.execute("select penstock.open_lake('lake', 'file:///lake')")
    await settle(sql, uuid4(), bill)
    await commit_to_lake(sql, 0, {"2026-01-01": 1})
    await sql.execute("delete from penstock.lake_files")
    await at(sql, START + timedelta(days=5))
    assert await dropped(sql) == {}
    await sql.execute("update penstock.lakes set guards = false")
    assert await dropped(sql) == {"archived_jobs_k3_p20260101": 1}


async def test_a_reader_that_missed_a_class_is_told(sql: Sql, bill: str) -> None:
    seen = await sql.fetchval("select pg_current_snapshot()::text")
    await settle(sql, uuid4(), bill)
    await at(sql, START + timedelta(days=5))
    await sql.fetch("select * from penstock.prune('30 days')")
    lost = await sql.fetch("select day::text, jobs from penstock.archive_lost($1::text::pg_snapshot)", seen)
    assert [tuple(row) for row in lost] == [("2026-01-01", 1)]


@pytest.mark.parametrize("span", ["0", "-1 day", "366 days", "2 years"])
async def test_spans_that_no_class_has_are_refused(sql: Sql, bill: str, span: str) -> None:
    for option in ("keep_succeeded", "keep_failed"):
        with pytest.raises(asyncpg.PostgresError, match="keep must be positive and at most 365 days") as refused:
            await sql.execute("select penstock.change_job_type('bill', jsonb_build_object($1::text, $2::text))", option, span)
        assert refused.value.sqlstate == "PS400"


async def test_a_reader_of_the_archive_and_prune_do_not_wait_in_a_circle(sql: Sql, bill: str, url: str) -> None:
    await settle(sql, uuid4(), bill)
    await at(sql, START + timedelta(days=5))
    await sql.execute(PATIENT)
    reader = await asyncpg.connect(url)
    try:
        async with reader.transaction():
            # As a query does that was planned before: first the table of the class, then its partitions.
            await reader.execute("lock table only penstock.archived_jobs_k3 in access share mode")
            pruning = asyncio.create_task(dropped(sql))
            await waiting_for(reader, "archived_jobs_k3")
            assert await reader.fetchval("select count(*) from penstock.archived_jobs_k3_p20260101") == 1
        assert await pruning == {"archived_jobs_k3_p20260101": 1}
    finally:
        await reader.close()


async def test_a_reader_of_two_classes_and_prune_do_not_wait_in_a_circle(sql: Sql, url: str) -> None:
    await at(sql, START)
    await create(sql, "bill", 7, 30)
    for outcome in ("succeeded", "failed-for-good"):
        await settle(sql, uuid4(), "bill", outcome)
    await at(sql, START + timedelta(days=50))
    await sql.execute(PATIENT)
    reader = await asyncpg.connect(url)
    try:
        async with reader.transaction():
            # As a query over the archive does, which is between the two classes.
            await reader.execute("lock table only penstock.archived_jobs_k7 in access share mode")
            pruning = asyncio.create_task(dropped(sql))
            await waiting_for(reader, "archived_jobs_k7")
            await reader.execute("lock table only penstock.archived_jobs_k30 in access share mode")
        assert await pruning == {"archived_jobs_k7_p20260101": 1, "archived_jobs_k30_p20251230": 1}
    finally:
        await reader.close()


async def waiting_for(sql: Sql, table: str) -> None:
    """Wait until another transaction waits for a lock on the table."""
    waits = "select count(*) from pg_locks where not granted and relation = to_regclass('penstock.' || $1)"
    await eventually(lambda: sql.fetchval(waits, table))


async def test_a_query_over_the_archive_locks_the_classes_in_the_order_of_their_values(sql: Sql) -> None:
    await at(sql, START)
    # Made in another order than that of their values.
    for days in (90, 7, 365, 1, 30, 3):
        await create(sql, f"k{days}", days, days)
    plan = [line for (line,) in await sql.fetch("explain select * from penstock.archived_jobs")]
    found = [int(match[1] or 0) for line in plan if (match := re.search(r" on archived_jobs(?:_k(\d+))?_p", line))]
    assert found == sorted(found) and set(found) == {0, *CLASSES}, plan
