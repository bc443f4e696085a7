"""The proof for the lake: of encrypted work no word is in its files, decoded or not, nor in the server's files, nor in a log.

A worker in a process of its own does the work of `searched_app`, with the logging of payloads switched on, and the history
pipeline writes it to a lake with Delta tables. The same work without encryption shows that each search can find its words.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest

from penstock import Penstock
from penstock.core.encryption import new_key
from penstock.history.lake import KINDS, Lake
from penstock.spark.history import Pipeline, read_lake
from tests.encryption.searched_app import WORDS, Searched
from tests.encryption.searching import files_of, found_in
from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OF_FINISHED_JOBS = {
    f"numbat{what}"
    for what in (
        "payload", "result", "error", "batched", "batcherror", "finished", "inprocess", "message", "copyresult", "copyerror",
        "runresult",
    )
}  # fmt: skip
"""The words that the lake has of work that is not encrypted: payloads, results and errors of finished jobs."""


class Work:
    """The work on a server of its own, in one of the two ways.

    Args:
        folder: Folder for the files of everything.
        encrypted: Whether everything is declared as encrypted.
    """

    def __init__(self, folder: Path, *, encrypted: bool) -> None:
        self.folder = folder
        self.encrypted = encrypted
        self.lake = Lake("main", str(folder / "lake"))
        self.key = new_key()

    def do(self, spark: SparkSession) -> None:
        """Work, write the lake, and end the server, so that all is in its files."""
        app = Penstock(data_dir=self.folder / "data", keys=[self.key])
        searched = Searched(app, encrypted=self.encrypted)

        async def work() -> None:
            async with app:
                database = await app.database()
                # Pages in the write-ahead log would be compressed, and their words with them.
                await database.fetch("alter system set wal_compression = off")
                await database.fetch("select pg_reload_conf()")
                await searched.work(self._worker())
                url = app.database_url()
                await asyncio.to_thread(lambda: Pipeline(spark, url, self.lake, delta=True).run())
                self.read = await asyncio.to_thread(lambda: _read(spark, url))
                await database.fetch("checkpoint")

        asyncio.run(work())

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[None]:
        environment = {
            "PENSTOCK_DATA_DIR": str(self.folder / "data"), "PENSTOCK_KEYS": self.key, "PENSTOCK_LOG_LEVEL": "debug",
            "PENSTOCK_LOG_PAYLOADS": "1", "SEARCHED_ENCRYPTED": str(int(self.encrypted)),
        }  # fmt: skip
        arguments = [sys.executable, "-m", "penstock", "worker", "tests.encryption.searched_worker:app", "--log", "json"]
        with self.log.open("wb") as log:
            process = subprocess.Popen(arguments, env={**os.environ, **environment}, stdout=log, stderr=log)
            try:
                await eventually(lambda: "worker_started" in self.log.read_text(), "the start of the worker", 120)
                yield
            finally:
                process.terminate()
                process.wait(60)

    @property
    def log(self) -> Path:
        """The log of the worker."""
        return self.folder / "worker.log"

    def decoded(self) -> list[bytes]:
        """Each value of the lake: of each Parquet file, of each version of each Delta table, and as Spark reads it."""
        import deltalake

        files = [pyarrow.parquet.read_table(path, partitioning=None) for path in self.folder.rglob("*.parquet")]
        assert files
        folders = {
            kind: f"{self.lake.uri}/{kind}" for kind in KINDS if deltalake.DeltaTable.is_deltatable(f"{self.lake.uri}/{kind}")
        }
        # No workflow runs here, so that there may be no table of runs.
        assert folders.keys() >= {"jobs", "attempts", "rollups"}
        tables = [deltalake.DeltaTable(folder) for folder in folders.values()]
        for table in list(tables):
            tables += [deltalake.DeltaTable(table.table_uri, version=at) for at in range(table.version())]
        return [*map(_values, files), *(_values(table.to_pyarrow_table()) for table in tables if table.file_uris()), self.read]


def _values(table: Any) -> bytes:
    return b"\n".join(
        value if isinstance(value, bytes) else str(value).encode() for row in table.to_pylist() for value in row.values()
    )


def _read(spark: SparkSession, url: str) -> bytes:
    rows = [row for kind in KINDS for row in read_lake(spark, url, kind=kind).collect()]
    assert rows
    return b"\n".join(value if isinstance(value, bytes) else str(value).encode() for row in rows for value in row)


@pytest.mark.soak
@pytest.mark.embedded
@pytest.mark.timeout(600)
def test_no_word_is_in_the_lake_the_files_of_the_server_or_the_log_of_a_worker(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    encrypted = Work(tmp_path / "encrypted", encrypted=True)
    encrypted.folder.mkdir()
    encrypted.do(spark)
    out = capfd.readouterr()
    contents = [*files_of(encrypted.folder), *encrypted.decoded(), (out.out + out.err).encode()]
    assert found_in(contents) == set()
    # The same searches find them where nothing is encrypted.
    plain = Work(tmp_path / "plain", encrypted=False)
    plain.folder.mkdir()
    plain.do(spark)
    assert found_in(plain.decoded()) == OF_FINISHED_JOBS
    assert found_in([plain.read]) == OF_FINISHED_JOBS
    assert found_in(files_of(plain.folder / "data")) == set(WORDS)
    assert "numbaterror" in found_in([plain.log.read_bytes()])
