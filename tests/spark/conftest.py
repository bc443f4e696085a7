"""One Spark session for all tests of this folder: a JVM costs seconds and hundreds of megabytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FAST = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.task.maxFailures": "4",
    # A query without data asks for it at once again otherwise, and takes the processors from the other tests.
    "spark.sql.streaming.pollingDelay": "200ms",
    "spark.python.daemon.module": "tests.spark.daemon",
    # The code of all tests together is more than fits by default, where it would be compiled again and again.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents or here / "unit" in item.path.parents:
            continue
        if item.get_closest_marker("no_jvm") is None:
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from penstock.spark import session

    with pytest.MonkeyPatch.context() as patch:
        # For Spark's Python processes, which import tests.spark.daemon.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        found = session(master="local[2,4]", config=FAST)
    yield found
    found.stop()


@pytest.fixture
def plan_of() -> Callable[[DataFrame], str]:
    """The physical plan of a DataFrame, as text."""

    def plan_of(frame: DataFrame) -> str:
        with redirect_stdout(StringIO()) as printed:
            frame.explain()
        return printed.getvalue()

    return plan_of


@pytest.fixture
def ask(url: str) -> Callable[..., list[Any]]:
    """Run one statement on the test's database, outside Spark."""

    def ask(query: str, *args: Any) -> list[Any]:
        async def run() -> list[Any]:
            connection = await asyncpg.connect(url)
            try:
                return list(await connection.fetch(query, *args))
            finally:
                await connection.close()

        return asyncio.run(run())

    return ask


def on_database(url: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """Run a coroutine with a connection, outside Spark."""

    async def run() -> Any:
        connection = await asyncpg.connect(url)
        try:
            return await work(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


@pytest.fixture
def archive(ask: Callable[..., list[Any]]) -> Callable[..., None]:
    """Run jobs to their end: so many of a type, with a status."""

    def archive(jobs: int, name: str = "t", status: str = "succeeded", key: str | None = None) -> None:
        ask("select count(*) from penstock.declare_job_type($1, '{\"max_attempts\": 1}')", name)
        ask(
            "select count(*) from penstock.enqueue_many("
            "$1, array(select jsonb_build_object('n', n) from generate_series(1, $2::integer) n),"
            " p_keys => case when $3::text is not null then array_fill($3::text, array[$2::integer]) end)",
            name, jobs, key,
        )  # fmt: skip
        rows = ask("select id, attempt, lease from penstock.claim('w', array[$1], $2)", name, jobs)
        ask(
            "select * from penstock.settle($1, $2::smallint[], $3::bigint[], array_fill($4::text, array[$5::integer]),"
            " case when $4 <> 'succeeded' then array_fill($6::jsonb, array[$5::integer]) end)",
            [row["id"] for row in rows], [row["attempt"] for row in rows], [row["lease"] for row in rows], status, jobs,
            '{"type": "ValueError", "message": "no 17 in /a/b"}',
        )  # fmt: skip

    return archive
