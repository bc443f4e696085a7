"""Erasure and the history pipeline: what is erased while a batch is under way does not come to the lake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Erasure, Penstock
from penstock.history import erasing
from penstock.history.lake import Lake
from penstock.operations import queries
from penstock.operations.vacuuming import vacuum_erased
from penstock.spark.history import Pipeline, read_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PERSON, NEIGHBOUR = "anna-7f3c91", "bert-20aa55"


async def advance(url: str, lakes: bool) -> None:
    """Do what workers do for operations, and (`lakes`) what processes do that reach the files of lakes."""
    async with Penstock(url) as app:
        database = await app.database()
        while await queries.advance(database) is not None:
            pass
        if lakes:
            await erasing.erase_from_lakes(database)
            while await queries.advance(database) is not None:
                pass
            await vacuum_erased(database)


async def start(url: str) -> None:
    async with Penstock(url) as app:
        await app.operations.erase(Erasure(key=PERSON))


def apart(work: Any) -> None:
    """Run a coroutine in a thread: the process of a batch has its own loop."""
    thread = threading.Thread(target=lambda: asyncio.run(work))
    thread.start()
    thread.join()


@pytest.mark.parametrize("step", [pytest.param("jobs written", marks=pytest.mark.soak), "files moved"])
def test_a_batch_during_which_jobs_are_erased_is_read_again(
    spark: SparkSession, url: str, ask: Callable[..., list[Any]], archive: Callable[..., None], tmp_path: Path, step: str
) -> None:
    lake = Lake("main", str(tmp_path / "lake"))
    archive(20, key=NEIGHBOUR)
    archive(7, key=PERSON)
    done: list[str] = []

    def erase(at: str) -> None:
        if at == step and not done:
            done.append(at)
            apart(start(url))
            apart(advance(url, lakes=True))

    Pipeline(spark, url, lake, after_step=erase, delta=True).run()
    assert done
    assert ask("select state, phase from penstock.operations") == [("finished", "vacuum")]
    assert {row.key for row in read_lake(spark, url).collect()} == {NEIGHBOUR}
    assert read_lake(spark, url).count() == 20
    assert read_lake(spark, url, kind="attempts").filter(f"key = '{PERSON}'").count() == 0
    assert ask("select sum(succeeded)::integer from penstock.rollups") == [(20,)]
    root = Path(lake.uri.removeprefix("file://"))
    assert not [path for path in root.rglob("*") if path.is_file() and PERSON.encode() in path.read_bytes()]


def test_the_pipeline_erases_before_its_next_batch(
    spark: SparkSession, url: str, ask: Callable[..., list[Any]], archive: Callable[..., None], tmp_path: Path
) -> None:
    lake = Lake("main", str(tmp_path / "lake"))
    archive(20, key=NEIGHBOUR)
    archive(7, key=PERSON)
    Pipeline(spark, url, lake).run()
    assert read_lake(spark, url).count() == 27
    apart(start(url))
    apart(advance(url, lakes=False))
    assert ask("select phase from penstock.operations") == [("lake",)]
    archive(3, key=NEIGHBOUR)
    Pipeline(spark, url, lake).run()
    assert {row.key for row in read_lake(spark, url).collect()} == {NEIGHBOUR}
    assert read_lake(spark, url).count() == 23
    apart(advance(url, lakes=False))
    assert ask("select phase from penstock.operations") == [("vacuum",)]
