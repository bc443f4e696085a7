"""The history pipeline: what the lake and the rollups say is what plain SQL says."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
from pyspark.errors import StreamingQueryException
from structlog.testing import capture_logs

from penstock import Job, Penstock
from penstock.history import lake_queries as lakes
from penstock.history.lake import Lake
from penstock.spark.blocking import Blocking
from penstock.spark.history import Pipeline, compact, read_lake
from penstock.spark.sketches import merged, quantiles
from penstock.testing import run_due_jobs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Ask = Callable[..., list[Any]]


class Killed(Exception):
    """Instead of a kill, where the driver has to live on for the other tests."""


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake("main", str(tmp_path / "lake"))


def history(ask: Ask, jobs: int = 2000) -> None:
    """Finished jobs with known times, over some minutes and types, straight into the archive."""
    ask(
        "insert into penstock.archived_jobs (id, finished_at, created_at, run_after, started_at, status, attempt, max_attempts,"
        " priority, name, worker, key, data, errors)"
        " select gen_random_uuid(), base + make_interval(secs => n * 0.2 + run), base + make_interval(secs => n * 0.2 - delay),"
        " base + make_interval(secs => n * 0.2 - delay), base + make_interval(secs => n * 0.2),"
        " (case when n % 10 = 0 then 'failed' else 'succeeded' end)::penstock.archived_job_status, 1 + n % 3, 5, 0,"
        " case when n % 4 = 0 then 'mail' else 'ship/ment' end, 'w' || n % 2, 'key-' || n % 7, '{}',"
        " case when n % 3 > 0 or n % 10 = 0 then jsonb_build_array(jsonb_build_object('type', 'ValueError', 'message',"
        "   'flight ' || n || ' of ''AA'' failed', 'attempt', 1, 'worker', 'w1', 'started_at', base, 'failed_at', base)) end"
        " from (select n, random() * 3 as run, random() * random() * 20 as delay,"
        " date_trunc('minute', now()) - interval '5 minutes' as base from generate_series(1, $1::integer) n) numbered",
        jobs,
    )


def test_the_rollups_are_what_sql_says(spark: SparkSession, url: str, ask: Ask, lake: Lake) -> None:
    history(ask)
    # Two batches share a minute, whose rollups are merged.
    ran = Pipeline(spark, url, lake, max_rows=1100).run()
    assert (ran.batches, ran.jobs) == (2, 2000)
    expected = ask(
        "select name, date_trunc('minute', finished_at) as minute, count(*) filter (where status = 'succeeded') as succeeded,"
        " count(*) filter (where status = 'failed') as failed, sum(attempt - 1)::bigint as retries,"
        " round(sum(extract(epoch from started_at - run_after))::numeric, 3) as delay_s,"
        " round(sum(extract(epoch from finished_at - started_at))::numeric, 3) as run_s"
        " from penstock.archived_jobs group by 1, 2 order by 1, 2"
    )
    found = ask(
        "select name, minute, succeeded, failed, retries, round(delay_s::numeric, 3) as delay_s,"
        " round(run_s::numeric, 3) as run_s from penstock.rollups order by 1, 2"
    )
    assert [tuple(row)[:5] for row in found] == [tuple(row)[:5] for row in expected]
    for column in ("delay_s", "run_s"):
        assert [float(row[column]) for row in found] == pytest.approx([float(row[column]) for row in expected], abs=0.01)
    use = ask("select worker, sum(jobs)::integer as jobs from penstock.worker_use group by 1 order by 1")
    assert [tuple(row) for row in use] == [("w0", 1000), ("w1", 1000)]


def test_percentiles_are_within_the_error_of_the_sketch(spark: SparkSession, url: str, ask: Ask, lake: Lake) -> None:
    history(ask, 5000)
    assert Pipeline(spark, url, lake, max_rows=2600).run().batches == 2
    for name in ("mail", "ship/ment"):
        rows = ask("select delay_sketch, run_sketch from penstock.rollups where name = $1", name)
        for column, expression in (("delay_sketch", "started_at - run_after"), ("run_sketch", "finished_at - started_at")):
            for rank in (0.5, 0.95, 0.99):
                (value,) = quantiles(merged(row[column] for row in rows), [rank])
                (below,) = ask(
                    f"select avg((extract(epoch from {expression}) <= $2 + 1e-6)::integer)::float8 as rank"
                    " from penstock.archived_jobs where name = $1",
                    name, value,
                )  # fmt: skip
                assert abs(below["rank"] - rank) < 0.0166, (name, column, rank)


def test_the_lake_has_every_job_and_attempt_once(spark: SparkSession, url: str, ask: Ask, lake: Lake) -> None:
    history(ask, 900)
    Pipeline(spark, url, lake, max_rows=400).run()
    jobs = read_lake(spark, url, "main", "jobs").collect()
    expected = {str(row["id"]): row for row in ask("select * from penstock.archived_jobs")}
    assert len(jobs) == 900 and {job.id for job in jobs} == set(expected)
    assert {job.type for job in jobs} == {"mail", "ship/ment"}
    assert all(abs(job.finished_at.timestamp() - expected[job.id]["finished_at"].timestamp()) < 1e-5 for job in jobs)
    failed = sum(row["errors"] is not None for row in expected.values())
    succeeded = sum(row["status"] == "succeeded" for row in expected.values())
    attempts = read_lake(spark, url, "main", "attempts").groupBy("outcome").count().collect()
    assert {row.outcome: row["count"] for row in attempts} == {"failed": failed, "succeeded": succeeded}
    assert read_lake(spark, url, "main", "jobs", types=["mail"]).count() == 225
    assert read_lake(spark, url, "other").count() == 0


def test_errors_that_differ_in_what_varies_are_one_failure(spark: SparkSession, url: str, ask: Ask, lake: Lake) -> None:
    history(ask, 300)
    Pipeline(spark, url, lake).run()
    with Blocking(url) as database:
        found = database.run(lakes.failures(database.database, "main", ask("select current_date + 1 as d")[0]["d"], 7))
    assert {(f.name, f.kind, f.message, f.new) for f in found} == {
        ("mail", "ValueError", "flight <n> of <text> failed", True),
        ("ship/ment", "ValueError", "flight <n> of <text> failed", True),
    }
    assert (
        sum(f.failures for f in found) == ask("select count(*) from penstock.archived_jobs where errors is not null")[0]["count"]
    )


def run_of(url: str, workflow: str, id: str, *, failing: bool = False) -> None:
    """A run of three steps that has ended: of the second, one of two jobs fails where it is failing."""

    async def work() -> None:
        async with Penstock(url) as app:

            @app.job("step", max_attempts=1)
            async def step(job: Job[int]) -> None:
                if failing and job.data == 2:
                    raise ValueError("no rows")

            graph = app.workflow(workflow)
            first = graph.add(step, 0, step="first")
            many = graph.add_many(step, [1, 2], after=first, step="many")
            graph.add(step, 3, after=many, step="last")
            await graph.start(id=id)
            await run_due_jobs(app)

    asyncio.run(work())


def runs_of(spark: SparkSession, url: str) -> list[tuple[Any, ...]]:
    rows = read_lake(spark, url, "main", "runs").orderBy("finished_at").collect()
    return [(row.name, row.workflow, row.status, row.steps, row.failed, row.cancelled) for row in rows]


def test_each_run_of_a_workflow_is_in_the_lake_once(spark: SparkSession, url: str, ask: Ask, lake: Lake) -> None:
    long = "ü" * 200
    run_of(url, "nightly", "nightly-1")
    run_of(url, long, "a/long name".replace("/", " "), failing=True)
    expected = [("nightly-1", "nightly", "succeeded", 3, 0, 0), ("a long name", long, "failed", 3, 1, 1)]
    assert Pipeline(spark, url, lake).run().jobs == 8
    assert runs_of(spark, url) == expected
    # A run that is under way is not there yet, and what is there does not come again.
    ask("select penstock.create_job_type('slow')")
    ask('select penstock.start_workflow(\'slow\', \'slow-1\', \'[{"name": "a", "type": "slow"}]\')')
    run_of(url, "nightly", "nightly-2")
    Pipeline(spark, url, lake).run()
    expected.append(("nightly-2", "nightly", "succeeded", 3, 0, 0))
    assert runs_of(spark, url) == expected
    # The run ends in a transaction of its own, with which no job is archived: that is worth a batch too.
    ask("select penstock.cancel(job) from penstock.graph_steps where type = 'slow'")
    Pipeline(spark, url, lake).run()
    assert len(runs_of(spark, url)) == 3, "the end of its step has not been resolved"
    while ask("select penstock.resolve_workflows() as done")[0]["done"]:
        pass
    ran = Pipeline(spark, url, lake).run()
    assert (ran.batches, ran.jobs) == (1, 0)
    expected.append(("slow-1", "slow", "cancelled", 1, 0, 1))
    assert runs_of(spark, url) == expected
    assert Pipeline(spark, url, lake).run().batches == 0
    (row,) = read_lake(spark, url, "main", "runs", types=["slow"]).collect()
    (stored,) = ask("select * from penstock.run_history where name = 'slow-1'")
    (kept,) = ask("select id, created_at, finished_at from penstock.job_groups where name = 'slow-1'")
    assert (row.id, stored["id"], stored["started_at"]) == (str(kept["id"]), kept["id"], kept["created_at"])
    assert row.duration_s == pytest.approx((kept["finished_at"] - kept["created_at"]).total_seconds())
    with Blocking(url) as database:
        found = database.run(lakes.runs(database.database, "main", "nightly"))
    assert [run.name for run in found] == ["nightly-2", "nightly-1"]


@pytest.mark.parametrize("step", ["rollups written", "files moved", "committed"])
def test_a_batch_with_runs_that_is_repeated_has_them_once(spark: SparkSession, url: str, ask: Ask, lake: Lake, step: str) -> None:
    def kill(done: str) -> None:
        if done == step:
            raise Killed(step)

    run_of(url, "nightly", "nightly-1")
    with pytest.raises(Exception, match=step):
        Pipeline(spark, url, lake, after_step=kill).run()
    run_of(url, "nightly", "nightly-2")
    Pipeline(spark, url, lake).run()
    assert [name for name, *_ in runs_of(spark, url)] == ["nightly-1", "nightly-2"]
    assert [row["name"] for row in ask("select name from penstock.run_history order by finished_at")] == [
        "nightly-1",
        "nightly-2",
    ]


LONGER = [pytest.param(step, marks=pytest.mark.soak) for step in ("attempts written", "rollups written")]


@pytest.mark.parametrize("step", ["jobs written", *LONGER, "files moved", "committed"])
def test_a_run_that_ends_at_any_step_is_repeated_without_a_trace(
    spark: SparkSession, url: str, ask: Ask, lake: Lake, step: str
) -> None:
    def kill(done: str) -> None:
        if done == step:
            raise Killed(step)

    history(ask, 200)
    with pytest.raises(Exception, match=step):
        Pipeline(spark, url, lake, after_step=kill).run()
    history(ask, 50)
    Pipeline(spark, url, lake).run()
    assert read_lake(spark, url).count() == 250
    assert ask("select sum(succeeded + failed)::integer as jobs from penstock.rollups")[0]["jobs"] == 250
    root = Path(lake.uri.removeprefix("file://"))
    on_disk = {
        str(path.relative_to(root)) for kind in ("jobs", "attempts", "rollups") for path in (root / kind).rglob("*.parquet")
    }
    assert on_disk == {row["path"] for row in ask("select path from penstock.lake_files")}
    assert not list((root / "_staging").glob("*/*"))


@pytest.fixture
def late_python(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Let the Python process of a streaming query start too late, so many times; the returned file has a line for each start."""
    from penstock.spark import register

    def late(times: int) -> Path:
        starts, python = tmp_path / "starts", tmp_path / "python"
        python.write_text(
            "#!/bin/sh\n"
            'case "$*" in *python_streaming_source_runner*)\n'
            f"  echo started >> {starts}\n"
            # Spark waits for ten seconds, whether the process lives or not.
            f"  [ $(wc -l < {starts}) -gt {times} ] || exit 1;;\n"
            "esac\n"
            f'exec {sys.executable} "$@"\n'
        )
        python.chmod(0o700)
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
        register(spark)
        return starts

    yield late
    monkeypatch.undo()
    register(spark)


@pytest.mark.no_jvm
@pytest.mark.parametrize(("state", "stopped"), [("TERMINATED", True), ("ACTIVE", False)])
def test_a_stop_that_spark_takes_for_a_failure_ends_the_run(url: str, lake: Lake, state: str, stopped: bool) -> None:
    session = MagicMock()
    error = StreamingQueryException(f"[STREAM_FAILED] Query terminated with exception:\nCurrent State: {state}\n")
    stream = session.readStream.format().option().option().option().option().load().writeStream
    query = stream.queryName().foreachBatch().option().trigger().start()
    query.awaitTermination.side_effect = error
    with nullcontext() if stopped else pytest.raises(StreamingQueryException):
        assert Pipeline(session, url, lake).run(continuous=True).batches == 0
    query.awaitTermination.assert_called_once()


@pytest.mark.soak
def test_a_run_whose_python_process_starts_late_is_started_again(
    spark: SparkSession, url: str, ask: Ask, lake: Lake, late_python: Callable[[int], Path]
) -> None:
    history(ask, 50)
    starts = late_python(1)
    with capture_logs() as logs:
        ran = Pipeline(spark, url, lake).run()
    assert (ran.batches, ran.jobs) == (1, 50)
    assert starts.read_text().split() == ["started"] * 2
    assert [line["start"] for line in logs if line["event"] == "history_start_failed"] == [1]
    assert read_lake(spark, url).count() == 50


@pytest.mark.soak
def test_a_run_whose_python_process_never_starts_ends(
    spark: SparkSession, url: str, ask: Ask, lake: Lake, late_python: Callable[[int], Path]
) -> None:
    history(ask, 50)
    starts = late_python(100)
    with pytest.raises(Exception, match="Python worker failed to connect back"):
        Pipeline(spark, url, lake).run()
    assert starts.read_text().split() == ["started"] * 3


def test_compaction_changes_files_and_no_rows(spark: SparkSession, url: str, ask: Ask, lake: Lake) -> None:
    history(ask, 400)
    assert Pipeline(spark, url, lake, max_rows=210).run().batches == 2
    # All columns: Spark reads the times of a file that Arrow has written.
    before = sorted(read_lake(spark, url).collect(), key=lambda row: row.id)
    # Of two types and three kinds, the files of two batches.
    assert compact(url, lake, at_least=2) >= 12
    assert sorted(read_lake(spark, url).collect(), key=lambda row: row.id) == before
    assert compact(url, lake, at_least=2) == 0
    history(ask, 10)
    Pipeline(spark, url, lake).run()
    assert read_lake(spark, url).count() == 410


def test_prune_drops_only_what_the_lake_has_and_the_lake_still_finds_it(
    spark: SparkSession, url: str, ask: Ask, lake: Lake
) -> None:
    ask("select penstock.ensure_archive('2025-03-03T12:00:00Z')")
    insert = (
        "insert into penstock.archived_jobs (id, finished_at, created_at, run_after, status, attempt, max_attempts, priority,"
        " name, data) values (gen_random_uuid(), '2025-03-03T12:00:00Z', '2025-03-03T11:00:00Z', '2025-03-03T11:00:00Z',"
        " 'failed', 1, 1, 0, 't', '{\"n\": 1}') returning id"
    )
    (job,) = ask(insert)
    Pipeline(spark, url, lake).run()
    ask(insert)
    assert ask("select * from penstock.prune('30 days') where jobs > 0") == []
    Pipeline(spark, url, lake).run()
    assert [row["jobs"] for row in ask("select * from penstock.prune('30 days') where jobs > 0")] == [2]

    async def look() -> Any:
        async with Penstock(url) as app:
            return await app.find(job["id"])

    record = asyncio.run(look())
    assert (record.id, record.name, record.status, record.data) == (job["id"], "t", "failed", {"n": 1})


def test_a_continuous_run_goes_on_until_it_is_stopped(
    spark: SparkSession, url: str, ask: Ask, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped_back: list[timedelta] = []
    monkeypatch.setattr("penstock.spark.history.throttle", stepped_back.append)

    def until_the_lake_has(jobs: int) -> None:
        deadline = time.monotonic() + 120
        while not ask("select from penstock.lakes where jobs = $1", jobs):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def live() -> None:
        try:
            until_the_lake_has(300)
            history(ask, 200)
            until_the_lake_has(500)
        finally:
            for query in spark.streams.active:
                query.stop()

    history(ask, 300)
    with ThreadPoolExecutor(1) as other:
        living = other.submit(live)
        ran = Pipeline(spark, url, lake, throttle_timeout=timedelta(minutes=1)).run(continuous=True, interval="100 milliseconds")
        living.result()
    # The second batch may have been stopped before it was counted.
    assert ran.jobs in (300, 500)
    assert len(stepped_back) >= 2
    assert set(stepped_back) == {timedelta(minutes=1)}
