"""The lake: history as Parquet files by day and job type, and a manifest of them in Postgres.

Only the manifest defines which files belong to a lake; a file that it does not name was left by a crash and is ignored. Any
storage is therefore suitable, and a batch appears atomically. The lake needs the extra `spark` for pyarrow, but no JVM.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote
from uuid import UUID

import orjson

from penstock.core.checks import did_you_mean
from penstock.core.encryption import is_envelope
from penstock.core.extras import needs
from penstock.errors import NotFound, PenstockError
from penstock.history import lake_queries as lakes
from penstock.history.lake_queries import LakeFile, LakeRecord
from penstock.jobs import type_queries
from penstock.jobs.records import JobRecord, Status
from penstock.postgres.database import Database

if TYPE_CHECKING:
    import pyarrow.fs

KINDS = ("jobs", "attempts", "rollups", "runs")
_PLACE = re.compile(r"day=(\d{4}-\d{2}-\d{2})/type=([^/]+)/")


class Lake:
    """The files of a lake.

    Args:
        name: Name of the lake in Postgres.
        uri: Location: a folder, or a URI that pyarrow's file systems accept (`s3://`, `gs://`, `hdfs://`).
    """

    def __init__(self, name: str, uri: str) -> None:
        with needs("spark", "a lake of history"):
            import pyarrow  # noqa: F401
        self.name = name
        self.uri = uri_of(uri)
        self._opened: tuple[pyarrow.fs.FileSystem, str] | None = None

    @property
    def checkpoint(self) -> str:
        """Location of the checkpoint of the pipeline that fills the lake."""
        return f"{self.uri}/_checkpoint"

    def staging(self, batch: int, kind: str) -> str:
        """Location to which a batch is written before it is part of the lake."""
        return f"{self.uri}/_staging/{batch}/{kind}"

    def adopt(self, batch: int, kind: str, erasures: int = 0) -> list[LakeFile]:
        """Move the files of a batch from the staging folder to their places. The call may be repeated.

        Args:
            batch: Number of the batch.
            kind: Kind of files.
            erasures: Number of erasures in the lake when the batch was read. A file that is read again after one has another
                name, since the erasure may be about to delete the file of the attempt before.
        """
        import pyarrow.fs
        import pyarrow.parquet

        files, root = self._files
        source = f"{root}/_staging/{batch}/{kind}"
        moved = []
        attempt = f"e{erasures}-" if erasures else ""
        found = files.get_file_info(pyarrow.fs.FileSelector(source, recursive=True, allow_not_found=True))
        for number, info in enumerate(sorted((i for i in found if i.path.endswith(".parquet")), key=lambda i: i.path)):
            match = _PLACE.search(info.path)
            if match is None:
                raise PenstockError(f"the path of a file of batch {batch} has no day and type: {info.path}")
            rows = pyarrow.parquet.read_metadata(info.path, filesystem=files).num_rows
            path = f"{kind}/day={match[1]}/type={match[2]}/b{batch:09}-{attempt}{number}.parquet"
            files.create_dir(f"{root}/{path.rpartition('/')[0]}", recursive=True)
            files.move(info.path, f"{root}/{path}")
            moved.append(LakeFile(kind, date.fromisoformat(match[1]), unquote(match[2]), path, rows, info.size))
        return moved

    def discard(self, batch: int) -> None:
        """Remove the files of an unfinished attempt at a batch: its staging folder, and files with its number."""
        import pyarrow.fs

        self.clear(batch)
        files, root = self._files
        for kind in KINDS:
            for info in files.get_file_info(pyarrow.fs.FileSelector(f"{root}/{kind}", recursive=True, allow_not_found=True)):
                if f"/b{batch:09}-" in info.path:
                    files.delete_file(info.path)

    def clear(self, batch: int) -> None:
        """Remove the staging folder of a batch."""
        import pyarrow.fs

        files, root = self._files
        if files.get_file_info(f"{root}/_staging/{batch}").type is not pyarrow.fs.FileType.NotFound:
            files.delete_dir(f"{root}/_staging/{batch}")

    def write(self, path: str, table: Any) -> int:
        """Write a Parquet file below the URI, with times to the microsecond. Returns its size."""
        import pyarrow as pa
        import pyarrow.parquet

        # What Spark has written is read with nanoseconds and without a zone, which Spark does not read as a time.
        moment = pa.timestamp("us", tz="UTC")
        fields = [field.with_type(moment) if pa.types.is_timestamp(field.type) else field for field in table.schema]
        table = table.cast(pa.schema(fields, metadata=table.schema.metadata), safe=False)
        files, root = self._files
        files.create_dir(f"{root}/{path.rpartition('/')[0]}", recursive=True)
        pyarrow.parquet.write_table(table, f"{root}/{path}", filesystem=files, compression="zstd")
        return int(files.get_file_info(f"{root}/{path}").size)

    def remove(self, paths: Sequence[str]) -> None:
        """Delete files below the URI."""
        files, root = self._files
        for path in paths:
            try:
                files.delete_file(f"{root}/{path}")
            except FileNotFoundError:
                # Another process, or an earlier attempt, has deleted it.
                continue

    def data_files(self) -> list[str]:
        """The Parquet files below the URI, also those of unfinished batches, and what the storage keeps beside them."""
        import pyarrow.fs

        files, root = self._files
        found = []
        for folder in (*KINDS, "_staging"):
            for info in files.get_file_info(pyarrow.fs.FileSelector(f"{root}/{folder}", recursive=True, allow_not_found=True)):
                if info.is_file and "/_delta_log/" not in info.path and info.path.endswith((".parquet", ".parquet.crc")):
                    found.append(info.path.removeprefix(f"{root}/"))
        return found

    def size(self, path: str) -> int:
        """The size of a file below the URI."""
        files, root = self._files
        return int(files.get_file_info(f"{root}/{path}").size)

    def has(self, path: str) -> bool:
        """Whether there is a file or folder below the URI."""
        import pyarrow.fs

        files, root = self._files
        return bool(files.get_file_info(f"{root}/{path}").type is not pyarrow.fs.FileType.NotFound)

    def schema(self, path: str) -> Any:
        """The Arrow schema of a Parquet file below the URI, with the columns of its folders."""
        import pyarrow as pa
        import pyarrow.parquet

        files, root = self._files
        stored = pyarrow.parquet.read_schema(f"{root}/{path}", filesystem=files).remove_metadata()
        moment = pa.timestamp("us", tz="UTC")
        fields = [pa.field(f.name, moment if pa.types.is_timestamp(f.type) else f.type) for f in stored]
        return pa.schema([*fields, pa.field("day", pa.date32()), pa.field("type", pa.string())])

    def text(self, path: str) -> str:
        """The text of a file below the URI."""
        files, root = self._files
        with files.open_input_stream(f"{root}/{path}") as stream:
            return str(stream.read().decode())

    def table(self, paths: Sequence[str], columns: Sequence[str] | None = None, filter: Any = None) -> Any:
        """Files below the URI as one Arrow table."""
        import pyarrow.dataset

        files, root = self._files
        source = pyarrow.dataset.dataset([f"{root}/{path}" for path in paths], format="parquet", filesystem=files)
        return source.to_table(columns=columns, filter=filter)

    @property
    def _files(self) -> tuple[pyarrow.fs.FileSystem, str]:
        if self._opened is None:
            import pyarrow.fs

            files, root = pyarrow.fs.FileSystem.from_uri(self.uri)
            if isinstance(files, pyarrow.fs.LocalFileSystem):
                # It has ids, keys and errors: others read it when its owner opens the folder to them.
                Path(root).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    Path(root).mkdir(mode=0o700)
            else:
                files.create_dir(root, recursive=True)
            self._opened = files, root.rstrip("/")
        return self._opened


def uri_of(place: str) -> str:
    """The URI of a folder; a URI is returned as it is."""
    return place.rstrip("/") if "://" in place else "file://" + quote(str(Path(place).expanduser().resolve()))


async def known_lake(database: Database, name: str) -> LakeRecord:
    """The lake of this name. Raises `NotFound`."""
    known = {record.name: record for record in await lakes.lakes(database)}
    if name not in known:
        raise NotFound(f"there is no lake {name}", hint=did_you_mean(name, known) or "Create it: penstock history run")
    return known[name]


async def find(database: Database, id: UUID) -> JobRecord | None:
    """The record of a job from the lakes, for a job that the archive no longer has; None: no lake has it."""
    found = await lakes.lakes(database)
    for record in found:
        files = await lakes.files(database, record.name, "jobs", _days_of(id))
        if not files:
            continue
        row = await asyncio.to_thread(_row, Lake(record.name, record.uri), [file.path for file in files], id)
        if row is not None:
            types = await type_queries.job_types(database, [row["name"]])
            return _record(row, may_be_encrypted=not types or types[0].encrypted_at is not None)
    return None


def _days_of(id: UUID) -> tuple[date, date] | None:
    # A UUIDv7 has the time at which it was made, and no job finishes before. Clocks may differ by a day.
    if id.version != 7:
        return None
    made = date.fromtimestamp((id.int >> 80) / 1000)
    return made - timedelta(days=1), date.max


def _row(lake: Lake, paths: Sequence[str], id: UUID) -> dict[str, Any] | None:
    import pyarrow.dataset

    rows = lake.table(paths, filter=pyarrow.dataset.field("id") == str(id)).to_pylist()
    return rows[-1] if rows else None


def _record(row: dict[str, Any], *, may_be_encrypted: bool) -> JobRecord:
    status = Status(row["status"])

    def parsed(name: str) -> Any:
        return orjson.loads(row[name]) if row[name] is not None else None

    documents = [parsed("data"), parsed("result"), *({"penstock": one.get("penstock")} for one in parsed("errors") or [])]
    return JobRecord(
        id=UUID(row["id"]),
        name=row["name"],
        status=status,
        attempt=row["attempt"],
        max_attempts=row["max_attempts"],
        priority=row["priority"],
        key=row["key"],
        unique=row["unique_key"],
        data=parsed("data"),
        created_at=row["created_at"],
        run_after=row["run_after"],
        expires_at=row["expires_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        worker=row["worker"],
        errors=parsed("errors") or [],
        result=parsed("result"),
        progress=None,
        replay_of=UUID(row["replay_of"]) if row["replay_of"] else None,
        cancel_requested_at=None,
        encrypted=may_be_encrypted and any(map(is_envelope, documents)),
    )
