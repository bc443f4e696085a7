"""What is ahead of a restored database: checkpoints of Spark and lakes, and how a lake is brought back to it. Needs no JVM.

A restored database has forgotten what came after the time of the restore; files outside have not. A checkpoint whose position is
behind the end of the restored database has read what is lost, and would pass over what comes next under the same offsets. A lake
has files of batches that the database does not know of. docs/restore.md says what to do about each.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from penstock.errors import InvalidInput, NotFound
from penstock.history import lake_queries as lakes
from penstock.history import queries as history
from penstock.history.delta import DeltaLog
from penstock.history.erasing import follow
from penstock.history.lake import KINDS, Lake
from penstock.history.lake_queries import LakeFile, LakeRecord
from penstock.postgres.database import Database
from penstock.spark.checkpoints import Checkpoint, Folder
from penstock.spark.jobs.offsets import RESTORE, Position, check_restored
from penstock.spark.streams.offsets import STREAMS, Extent, from_json, identities_of, rolled_back
from penstock.streams import queries as streams

_BATCH = re.compile(r"/b(\d{9})[^/]*\.parquet$")


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """A checkpoint of a Spark query, and what of it is ahead of the database.

    Attributes:
        uri: Location.
        query: Id of the query; None: the checkpoint has none.
        batch: Number of the last batch that was planned; -1: none.
        ahead: What is ahead, in words; empty: nothing.
        ends: The ends of the streams that it reads, in the form of the option `startingOffsets`.
        last_known: Of a query that writes to Penstock, the last batch that the database has; None: it has none.
    """

    uri: str
    query: str | None
    batch: int
    ahead: list[str]
    ends: dict[str, dict[str, Any]]
    last_known: int | None


@dataclass(frozen=True, slots=True)
class LakeState:
    """A lake, and what of it is ahead of the database.

    Attributes:
        name: Name of the lake.
        batch: Number of the last batch that the database knows of.
        ahead: Files of later batches.
        missing: Files that the database names and that are not there, since a compaction or an erasure has replaced them.
        jobs: Jobs in the files that are ahead.
        again: Those that wait in the database, by type: they have run, and will run again.
        unknown: Those of which the database knows nothing: they were enqueued after the time of the restore.
        checkpoint: Number of the last batch in the checkpoint of the pipeline; None: it has none.
    """

    name: str
    batch: int
    ahead: list[str]
    missing: list[str]
    jobs: int
    again: dict[str, int]
    unknown: int
    checkpoint: int | None


async def look_at_checkpoint(database: Database, place: str) -> CheckpointState:
    """What a checkpoint has that the database does not.

    Args:
        database: The restored database.
        place: Folder or URI of the checkpoint.

    Raises:
        NotFound: There is no checkpoint.
    """
    checkpoint = await asyncio.to_thread(Checkpoint.of, place)
    numbers = checkpoint.batches
    ahead: list[str] = []
    ends: dict[str, dict[str, Any]] = {}
    if numbers:
        for source in await asyncio.to_thread(checkpoint.sources, numbers[-1]) or ():
            document = source if isinstance(source, dict) else {}
            if STREAMS in document:
                ahead += await _streams_ahead(database, document, ends)
            elif "seen" in document:
                try:
                    check_restored(
                        Position.from_json(dict(document)), int(document.get(RESTORE, 0)), await history.restored(database)
                    )
                except InvalidInput as error:
                    ahead.append(error.message)
    known = await database.fetchval("select max(epoch) from penstock.sink_epochs where query = $1", checkpoint.query)
    done = await asyncio.to_thread(checkpoint.folder.numbers, "commits")
    if known is not None and done and done[-1] > known:
        ahead.append(f"the query has written {done[-1] - known} batches after batch {known}, which is the last that is there")
    return CheckpointState(checkpoint.uri, checkpoint.query, numbers[-1] if numbers else -1, ahead, ends, known)


async def _streams_ahead(database: Database, document: Mapping[str, Any], ends: dict[str, dict[str, Any]]) -> list[str]:
    offsets, identities = from_json(document), identities_of(document)
    there = {stream.name for stream in await streams.list_streams(database)}
    gone = sorted({stream for stream, _ in offsets} - there)
    extents = {}
    for row in await streams.bounds_of(database, sorted({stream for stream, _ in offsets} & there)):
        extents[row.stream, row.partition] = Extent(row.first, row.next, row.compressed, row.identity, row.restored)
        ends.setdefault(row.stream, {})[str(row.partition)] = min([row.next, *row.restored.values()])
        # With them, streams and partitions that come later are read from their beginning.
        ends.setdefault(STREAMS, {})[row.stream] = row.identity
    behind = rolled_back(offsets, extents, identities)
    found = list(behind.values())
    found += [
        f"partition {partition} of {stream} was read up to offset {offset}, and ends at {extents[stream, partition].next}"
        for (stream, partition), offset in sorted(offsets.items())
        if (stream, partition) in extents and (stream, partition) not in behind and offset > extents[stream, partition].next
    ]
    return found + [f"stream {stream} is not there: it was created after the time of the restore" for stream in gone]


async def look_at_lake(database: Database, record: LakeRecord) -> LakeState:
    """What a lake has that the database does not."""
    lake = Lake(record.name, record.uri)
    named = {file.path: file for kind in KINDS for file in await lakes.files(database, record.name, kind)}
    there = await asyncio.to_thread(lake.data_files)
    ahead = sorted(path for path in there if path not in named and _batch_of(path) > record.batch)
    numbers = await asyncio.to_thread(Folder(lake.checkpoint).numbers, "offsets")
    jobs = [path for path in ahead if path.startswith("jobs/")]
    ids = await asyncio.to_thread(_ids, lake, jobs) if jobs else {}
    waiting = Counter(
        {
            row["name"]: row["jobs"]
            for row in await database.fetch(
                "select name, count(*) as jobs from penstock.queued_jobs where id = any ($1) group by name order by name",
                list(ids),
            )
        }
    )
    known = await database.fetchval(
        "select count(distinct id) from (select id from penstock.queued_jobs where id = any ($1)"
        " union all select id from penstock.archived_jobs where id = any ($1)) as found",
        list(ids),
    )
    missing = sorted(path for path in named if path not in set(there))
    return LakeState(
        record.name, record.batch, ahead, missing, len(ids), dict(waiting), len(ids) - known, numbers[-1] if numbers else None
    )


def _batch_of(path: str) -> int:
    found = _BATCH.search(path)
    return int(found[1]) if found else -1


def _ids(lake: Lake, paths: Sequence[str]) -> dict[UUID, str]:
    table = lake.table(paths, ["id", "name"])
    return {UUID(id): name for id, name in zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True)}


async def cut_lake(database: Database, record: LakeRecord) -> LakeState:
    """Bring a lake back to the database: its files, its Delta tables and the checkpoint of its pipeline. May be repeated.

    Args:
        database: The restored database. No pipeline runs.
        record: The lake.

    Returns:
        What was ahead.

    Raises:
        NotFound: Files that the database names are not there, and no compacted file has exactly their rows.
    """
    state = await look_at_lake(database, record)
    lake = Lake(record.name, record.uri)
    if state.missing:
        await _take_compacted(database, record, lake, state.missing)
    if DeltaLog(lake).exists():
        await follow(database, lake)
    await asyncio.to_thread(_cut_checkpoint, lake, record)
    await asyncio.to_thread(lake.remove, state.ahead)
    for path in await asyncio.to_thread(lake.data_files):
        if path.startswith("_staging/"):
            await asyncio.to_thread(lake.remove, [path])
    return state


async def _take_compacted(database: Database, record: LakeRecord, lake: Lake, missing: Sequence[str]) -> None:
    """Take compacted files for the files that they have replaced, which are no longer there."""
    named = {file.path: file for kind in KINDS for file in await lakes.files(database, record.name, kind)}
    there = await asyncio.to_thread(lake.data_files)
    by_folder: dict[str, list[LakeFile]] = {}
    for path in missing:
        by_folder.setdefault(path.rpartition("/")[0], []).append(named[path])
    for folder, files in by_folder.items():
        rows = sum(file.rows for file in files)
        others = [
            path for path in there if path.rpartition("/")[0] == folder and path not in named and _batch_of(path) <= record.batch
        ]
        fitting = [path for path in others if await asyncio.to_thread(_rows, lake, path) == rows]
        if not fitting:
            raise NotFound(
                f"{len(files)} files of the lake {record.name} in {folder} are not there",
                hint="They were compacted with later ones, or erased. Restore the folder of the lake from its own backup, or drop"
                " the lake (penstock.drop_lake) and fill a new one from the archive: docs/restore.md.",
            )
        first = files[0]
        size = await asyncio.to_thread(lake.size, fitting[0])
        new = LakeFile(first.kind, first.day, first.type, fitting[0], rows, size)
        await lakes.swap_files(database, record.name, [file.path for file in files], _batch_of(fitting[0]), [new])


def _rows(lake: Lake, path: str) -> int:
    return int(lake.table([path], ["name"]).num_rows)


def _cut_checkpoint(lake: Lake, record: LakeRecord) -> None:
    """Take the batches out of the checkpoint that the database does not know of, so that the pipeline reads them again."""
    folder = Folder(lake.checkpoint)
    offsets = folder.numbers("offsets")
    if offsets and record.batch >= 0 and record.batch not in offsets:
        # Spark keeps the last hundred batches. The position of this one is in the database.
        lines = (folder.text(f"offsets/{offsets[-1]}") or "").splitlines()
        folder.write(f"offsets/{record.batch}", "\n".join([*lines[:2], json.dumps({"seen": record.seen})]))
        folder.write(f"commits/{record.batch}", 'v1\n{"nextBatchWatermarkMs":0}')
    for name in ("offsets", "commits"):
        for number in folder.numbers(name):
            if number > record.batch:
                folder.remove(f"{name}/{number}")
