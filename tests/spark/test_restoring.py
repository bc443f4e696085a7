"""After a restore to a point in time the steps of docs/restore.md lead to a running system, and what is ahead is told. No JVM.

The checkpoints have the form in which Spark writes them, with the positions that the readers of the queries give.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from penstock import Conflict, InvalidInput, Job, NewEvent, NewJob, NotFound, OffsetGone, Penstock, Status
from penstock.history import lake_queries
from penstock.history.delta import DeltaLog
from penstock.history.erasing import follow
from penstock.history.lake import Lake
from penstock.history.lake_queries import LakeFile
from penstock.spark import restored
from penstock.spark.jobs.options import JobReadOptions
from penstock.spark.jobs.source import ArchiveStreamReader
from penstock.spark.streams.offsets import Offsets, from_json
from penstock.spark.streams.options import EventReadOptions
from penstock.spark.streams.source import EventStreamReader
from penstock.testing import consumed, running_worker
from penstock.worker import doctor
from tests.command_line import penstock
from tests.own_server import OwnServer
from tests.waiting import eventually

pytestmark = [pytest.mark.no_jvm, pytest.mark.timeout(300)]
Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture
async def server() -> AsyncIterator[OwnServer]:
    server = OwnServer()
    try:
        await server.create()
        yield server
    finally:
        server.remove()


async def asked(server: OwnServer, query: str, *args: Any) -> list[Any]:
    """The rows of a query, on a connection of its own: a restore ends all others."""
    connection = await asyncpg.connect(server.url)
    try:
        return list(await connection.fetch(query, *args))
    finally:
        await connection.close()


async def claimed(server: OwnServer, worker: str, name: str, jobs: int) -> list[tuple[UUID, int, int]]:
    """Jobs that a worker in SQL has claimed: id, attempt, lease."""
    rows = await asked(server, "select id, attempt, lease from penstock.claim($1, array[$2], $3)", worker, name, jobs)
    return [(row["id"], row["attempt"], row["lease"]) for row in rows]


async def settled(server: OwnServer, jobs: list[tuple[UUID, int, int]]) -> list[str]:
    """Settle jobs as succeeded; what is not plain success is returned."""
    ids, attempts, leases = (list(column) for column in zip(*jobs, strict=True))
    rows = await asked(server, "select outcome from penstock.settle($1, $2::smallint[], $3::bigint[])", ids, attempts, leases)
    return [row["outcome"] for row in rows]


def stream_reader(url: str, **options: str) -> EventStreamReader:
    given = {"url": url, "waitS": "0", "subscribe": "orders", "startingOffsets": "earliest", **options}
    shape = {"type": "struct", "fields": [{"name": "offset", "type": "long", "nullable": True, "metadata": {}}]}
    return EventStreamReader(EventReadOptions.parse(given), StructType.fromJson(shape))


def archive_reader(url: str) -> ArchiveStreamReader:
    options = JobReadOptions.parse({"url": url, "table": "archived_jobs", "waitS": "0", "startingOffsets": "earliest"})
    return ArchiveStreamReader(options, ["id"])


async def next_offset(reader: Any, start: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a query would write into its checkpoint next. Its process has a loop of its own."""

    def call() -> dict[str, Any]:
        found: dict[str, Any] = reader.latestOffset(reader.initialOffset() if start is None else dict(start), ReadAllAvailable())
        return found

    return await asyncio.to_thread(call)


class Checkpoint:
    """A checkpoint as Spark writes it."""

    def __init__(self, folder: Path, query: str) -> None:
        self.folder = folder
        (folder / "offsets").mkdir(parents=True)
        (folder / "commits").mkdir()
        (folder / "metadata").write_text(json.dumps({"id": query}))

    def add(self, batch: int, offset: Mapping[str, Any]) -> None:
        (self.folder / "offsets" / str(batch)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(offset)}')
        (self.folder / "offsets" / f".{batch}.crc").write_text("crc")
        (self.folder / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')

    def batches(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "offsets").iterdir())


async def add_batch(app: Penstock, lake: Lake, batch: int, seen: str) -> None:
    """What the pipeline does with a batch: files of jobs that finished, and their place in the manifest."""
    database = await app.database()
    rows = await database.fetch(
        "select id::text, name, (finished_at at time zone 'UTC')::date as day from penstock.archived_jobs"
    )
    known = [file.path for file in await lake_queries.files(database, lake.name, "jobs")]
    there = set(lake.table(known, ["id"])["id"].to_pylist()) if known else set()
    new = [row for row in rows if row["id"] not in there]
    path = f"jobs/day={new[0]['day']}/type=mail/b{batch:09}-0.parquet"
    size = lake.write(path, pa.table({"id": [row["id"] for row in new], "name": [row["name"] for row in new]}))
    file = LakeFile("jobs", new[0]["day"], "mail", path, len(new), size)
    await lake_queries.commit_batch(database, lake.name, batch, seen, len(new), [file], [], [], [], 0)
    await follow(database, lake)


def delta_rows(lake: Lake) -> int:
    import deltalake

    return int(deltalake.DeltaTable(f"{lake.uri}/jobs").to_pyarrow_table().num_rows)


async def test_the_steps_of_the_document_lead_to_a_running_system(server: OwnServer, tmp_path: Path) -> None:
    lake = Lake("main", str(tmp_path / "lake"))
    reading, archived = Checkpoint(tmp_path / "reading", "reading"), Checkpoint(tmp_path / "lake" / "_checkpoint", "history")
    early = Checkpoint(tmp_path / "early", "early")

    def shop() -> tuple[Penstock, Any, list[str], list[int]]:
        app = Penstock(server.url)
        ran: list[str] = []
        seen: list[int] = []

        @app.job("mail")
        async def mail(job: Job[int]) -> None:
            ran.append(f"mail {job.id}")

        @app.job("pay", delivery="at_most_once")
        async def pay(job: Job[int]) -> None:
            ran.append(f"pay {job.id}")

        orders = app.stream("orders", int, partitions=1)

        @orders.consumer(group="billing")
        async def bill(event: Any) -> None:
            seen.append(event.data)

        return app, orders, ran, seen

    # -- before the time
    assert penstock(server.url, "migrate").returncode == 0
    app, orders, _, _ = shop()
    async with app:
        await orders.append_many([NewEvent(n) for n in range(100)])
        await app.enqueue_many("mail", [NewJob(n) for n in range(10)])
        await settled(server, await claimed(server, "old", "mail", 3))
        await lake_queries.open_lake(await app.database(), lake.name, lake.uri)
        position = await next_offset(archive_reader(server.url))
        await add_batch(app, lake, 0, position["seen"])
        archived.add(0, position)
        early.add(0, await next_offset(stream_reader(server.url)))
        await server.take_backup()
        (in_progress,) = await claimed(server, "old", "mail", 1)
        await app.enqueue_many("pay", [NewJob(1), NewJob(2)])
        await claimed(server, "old", "pay", 1)
        waiting = [
            row["id"]
            for row in await asked(server, "select id from penstock.queued_jobs where status = 'queued' and name = 'mail'")
        ]
        (row,) = await asked(server, "select clock_timestamp() as time, nextval('penstock.lease_id') as lease")
        time: datetime = row["time"]
        # -- after it
        again = await claimed(server, "old", "mail", 4)
        await settled(server, again[:3])
        held = again[3]
        lost_job = await app.enqueue("mail", 77)
        await settled(server, await claimed(server, "old", "mail", 10))
        await orders.append_many([NewEvent(n) for n in range(100, 150)])
        reading.add(0, await next_offset(stream_reader(server.url)))
        position = await next_offset(archive_reader(server.url), position)
        await add_batch(app, lake, 1, position["seen"])
        archived.add(1, position)
        assert delta_rows(lake) == len(await asked(server, "select from penstock.archived_jobs"))
    await server.archive_everything()
    await server.restore(time)

    # -- step 3: look
    (row,) = await asked(server, "select count(*) as events from penstock.read_events('orders', 0, 0, 1000)")
    assert row["events"] == 100
    where = [f"--checkpoint={each.folder}" for each in (reading, early, archived)]
    looked = penstock(server.url, "restore", "check", *where, "--json")
    assert looked.returncode == 1, looked.stderr
    report = json.loads(looked.stdout)
    assert (report["unfenced"], report["in_progress"], report["at_most_once"]) == (True, 2, ["pay"])
    (ahead,) = report["lakes"]
    # Of the jobs in its files that are ahead, those that were enqueued before the time will run again.
    assert (ahead["batch"], len(ahead["ahead"]), ahead["jobs"], ahead["unknown"], ahead["checkpoint"]) == (0, 1, 6, 1, 1)
    assert ahead["again"] == {"mail": 5}
    states = {Path(each["uri"]).name: each for each in report["checkpoints"]}
    assert states["reading"]["ahead"] == ["partition 0 of orders was read up to offset 150, and ends at 100"]
    ends = states["reading"]["ends"]
    # With the identity of the stream, what comes later is read from its beginning.
    assert ends["orders"] == {"0": 100} and ends.keys() == {"orders", "@streams"}
    assert states["early"]["ahead"] == []
    found = {finding.check: finding.level for finding in await examined(server)}
    assert found["restore"] == "problem"

    # -- step 4: fence
    fenced = json.loads(penstock(server.url, "restore", "fence", "--json").stdout)
    assert fenced == {"number": 1, "jobs": 2, "paused": ["pay"]}
    statuses = {
        row["name"]: row["status"]
        for row in await asked(server, "select name, status from penstock.archived_jobs where name = 'pay'")
    }
    # It had been claimed by a client that does not say when it begins.
    assert statuses == {"pay": "failed"}
    assert await asked(server, "select from penstock.leases") == []
    # A worker that was not stopped reports under the lease that it had got after the time.
    new = {job[0]: job for job in await claimed(server, "new", "mail", 10)}
    assert held[0] in new and new[held[0]][:2] == held[:2] and new[held[0]][2] > held[2]
    assert await settled(server, [held]) == ["stale"]
    await asked(server, "select penstock.recover()")

    # -- checkpoints that are ahead are refused, also when new events have passed them
    for more in (0, 100):
        async with Penstock(server.url) as app:
            await app.stream("orders", int).append_many([NewEvent(1_000 + n) for n in range(more)])
        last = json.loads((reading.folder / "offsets" / "0").read_text().splitlines()[-1])
        with pytest.raises(
            OffsetGone, match="was read up to offset 150, and the database was restored to a time at which it ended at 100"
        ):
            await next_offset(stream_reader(server.url), last)
        with pytest.raises(OffsetGone, match="was read up to offset 150"):
            await asyncio.to_thread(stream_reader(server.url).partitions, {**last, "orders": {"0": 90}}, last)
        lenient = await next_offset(stream_reader(server.url, failOnDataLoss="false"), last)
        assert places(lenient) == {("orders", 0): 100 + more}
        position = json.loads((archived.folder / "offsets" / "1").read_text().splitlines()[-1])
        with pytest.raises(InvalidInput, match="the database was restored|the archive ends at transaction"):
            await next_offset(archive_reader(server.url), position)
    before = json.loads((early.folder / "offsets" / "0").read_text().splitlines()[-1])
    assert places(await next_offset(stream_reader(server.url), before)) == {("orders", 0): 200}

    # -- step 5: the lake
    cut = json.loads(penstock(server.url, "restore", "lake", "--json").stdout)
    assert len(cut["ahead"]) == 1
    assert archived.batches() == [".0.crc", "0"]
    assert delta_rows(lake) == 3
    assert [path for path in lake.data_files() if path.endswith(".parquet")] == [
        f"jobs/day={day_of(lake)}/type=mail/b000000000-0.parquet"
    ]
    kept = json.loads((archived.folder / "offsets" / "0").read_text().splitlines()[-1])
    assert (await next_offset(archive_reader(server.url), kept))["restore"] == 1
    assert penstock(server.url, "restore", "check", *where[1:]).returncode == 0

    # -- steps 7 and 8: everything runs
    app, orders, ran, seen = shop()
    async with app:
        await asked(server, "update penstock.leases set expires_at = now() - interval '1 second'")
        await asked(server, "select penstock.recover()")
        assert (await app.find(in_progress[0])).status is Status.QUEUED
        with pytest.raises(NotFound):
            await app.find(lost_job.id)
        async with running_worker(app):
            await app.resume("pay")
            await consumed(orders, "billing")
            await eventually(lambda: len(ran) == 8, "all jobs", 60)
        # Those that had finished after the time have run again, under the same ids.
        assert {f"mail {id}" for id in (*waiting, in_progress[0])} == {each for each in ran if each.startswith("mail")}
        assert seen == [*range(100), *range(1_000, 1_100)]
        await add_batch(app, lake, 1, "")
    found = {finding.check: finding.level for finding in await examined(server)}
    assert found["restore"] == "ok"


async def examined(server: OwnServer) -> list[doctor.Finding]:
    async with Penstock(server.url) as app:
        return await app.doctor()


def places(document: Mapping[str, Any]) -> Offsets:
    return from_json({name: value for name, value in document.items() if not name.startswith("@")})


def day_of(lake: Lake) -> str:
    (path,) = lake.data_files()
    return path.split("day=")[1].split("/")[0]


@pytest.fixture
async def small(app: Penstock, tmp_path: Path) -> Lake:
    """A lake with two batches of the manifest."""
    lake = Lake("main", str(tmp_path / "a lake"))
    database = await app.database()
    await lake_queries.open_lake(database, "main", lake.uri)
    for batch in range(2):
        await lake_queries.commit_batch(
            database, "main", batch, f"{batch}:{batch}:", 5, [written(lake, f"b{batch:09}-0", 5)], [], [], [], 0
        )
    return lake


def written(lake: Lake, name: str, rows: int) -> LakeFile:
    path = f"jobs/day=2026-03-01/type=mail/{name}.parquet"
    ids = [f"00000000-0000-7000-8000-{n:012}" for n in range(rows)]
    size = lake.write(path, pa.table({"id": ids, "name": ["mail"] * rows}))
    return LakeFile("jobs", datetime(2026, 3, 1).date(), "mail", path, rows, size)


async def test_files_that_a_compaction_has_replaced_are_found_in_the_compacted_one(app: Penstock, small: Lake) -> None:
    database = await app.database()
    for file in await lake_queries.files(database, "main", "jobs"):
        small.remove([file.path])
    written(small, "b000000001c2-1", 9)
    (record,) = await lake_queries.lakes(database)
    with pytest.raises(NotFound, match="2 files of the lake main"):
        await restored.cut_lake(database, record)
    whole = written(small, "b000000001c2-2", 10)
    await restored.cut_lake(database, record)
    assert [file.path for file in await lake_queries.files(database, "main", "jobs")] == [whole.path]
    assert not DeltaLog(small).exists()


async def test_a_checkpoint_that_has_forgotten_the_batch_is_written_again(app: Penstock, small: Lake, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "a lake" / "_checkpoint", "history")
    for batch in (100, 101):
        checkpoint.add(batch, {"seen": f"{batch}:{batch}:"})
    database = await app.database()
    (record,) = await lake_queries.lakes(database)
    await restored.cut_lake(database, record)
    assert checkpoint.batches() == ["1"]
    assert (checkpoint.folder / "offsets" / "1").read_text().splitlines()[-1] == '{"seen": "1:1:"}'


async def test_the_report_names_what_is_to_be_decided(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("pay", delivery_strategy="at_most_once")
    await app.create_job_type("idle", delivery_strategy="at_most_once")
    await app.enqueue("pay")
    await sql.execute(
        "insert into penstock.schedules (name, kind, spec, next_at, updated_at) values"
        " ('nightly', 'cron', '0 3 * * * UTC', now() - interval '1 hour', now()),"
        " ('later', 'every', '60', now() + interval '1 hour', now())"
    )
    orders = app.stream("orders", int)
    await orders.append(1)
    await orders.producer("tills").append(2)
    assert tuple(await sql.fetchrow("select * from penstock.restore_report()")) == (
        False, 0, ["pay"], ["nightly"], ["orders: tills"],
    )  # fmt: skip


async def test_a_producer_that_kept_running_is_refused_and_a_new_one_sends_again(app: Penstock, sql: Sql) -> None:
    orders = app.stream("orders", int, partitions=1)
    producer = orders.producer("tills")
    for n in range(3):
        await producer.append(n)
    # The restored database has the first batch alone.
    await sql.execute("update penstock.stream_producers set sequence = 1")
    await sql.fetch("select * from penstock.fence_restored()")
    with pytest.raises(Conflict, match="is not the next one: the last was 1"):
        await producer.append(3)
    again = orders.producer("tills")
    for n in range(1, 4):
        await again.append(n)
    assert [event.data for event in await orders.read(0)] == [0, 1, 2, 1, 2, 3]


async def test_what_lost_nothing_is_only_noted(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    await app.enqueue("mail")
    await sql.fetch("select * from penstock.claim('w', array['mail'], 1)")
    await sql.execute("update penstock.restores set system_id = '1'")
    assert await sql.fetchval("select penstock.is_unfenced()")
    assert tuple(await sql.fetchrow("select * from penstock.fence_restored(true)")) == (1, 0, [])
    assert not await sql.fetchval("select penstock.is_unfenced()")
    assert await sql.fetchval("select count(*) from penstock.leases") == 1
    assert await sql.fetch("select * from penstock.restored()") == []


async def test_a_place_without_a_checkpoint_is_refused(app: Penstock, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no checkpoint"):
        await restored.look_at_checkpoint(await app.database(), str(tmp_path))


async def test_a_writer_whose_batches_the_database_has_lost_is_told(app: Penstock, sql: Sql, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "writing", "6f1c")
    for batch in range(4):
        checkpoint.add(batch, {"topic": batch})
    await sql.execute("insert into penstock.sink_epochs values ('w', 'stream orders', 'me', '6f1c', 1, 10, now())")
    state = await restored.look_at_checkpoint(await app.database(), str(checkpoint.folder))
    assert (state.batch, state.last_known) == (3, 1)
    assert state.ahead == ["the query has written 2 batches after batch 1, which is the last that is there"]
