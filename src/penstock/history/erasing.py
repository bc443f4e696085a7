"""Erasure in lakes: files are rewritten without the jobs that are erased, and what the manifest does not name is deleted.

Workers do not reach the files of a lake. So an erasure waits in its phase `lake` until a process does that has access to them:
the history pipeline before each batch, or `penstock erase --finish`. The order makes each step safe to repeat. Files of attempts
come first, by the ids that are found in the files of jobs; these come last, so that an interrupted erasure finds the ids again.
Files of runs keep their rows, whose names lose the key or the value. Then the lake is fenced: a batch that was read from the
archive before that cannot be committed. What was left by crashes, compaction and unfinished batches is deleted after that.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from penstock.core.logs import get_logger
from penstock.errors import Conflict
from penstock.history import lake_queries as lakes
from penstock.history.delta import DeltaLog
from penstock.history.lake import KINDS, Lake
from penstock.history.lake_queries import LakeErasure, LakeFile, LakeRecord
from penstock.postgres.database import Database

log = get_logger("penstock.history")
_TRIES = 5
_AT_ONCE = 100_000


def _no_step(_: str) -> None:
    pass


async def erase_from_lakes(database: Database, only: str | None = None, after_step: Callable[[str], None] = _no_step) -> int:
    """Erase from lakes what erasures wait for.

    Args:
        database: Database of the lakes.
        only: Name of the one lake to erase from; None: all.
        after_step: Called with the name of each step when it is done, for tests that end the process at each.

    Returns:
        The number of jobs that were erased.

    Raises:
        Conflict: A lake got further batches again and again meanwhile.
        FileNotFoundError: A file of a lake is not there: this process does not reach it.
    """
    erased = 0
    for erasure in await lakes.erasures(database):
        for record in await lakes.lakes(database):
            if record.name in erasure.lakes or only not in (None, record.name):
                continue
            jobs = await _erase(database, record.name, erasure, after_step)
            await lakes.finish_lake(database, erasure.id, record.name, jobs)
            log.info("lake_erased", lake=record.name, operation=str(erasure.id), jobs=jobs)
            erased += jobs
    return erased


async def _erase(database: Database, name: str, erasure: LakeErasure, after_step: Callable[[str], None]) -> int:
    jobs = 0
    for attempt in range(1, _TRIES + 1):
        record = next(known for known in await lakes.lakes(database) if known.name == name)
        lake = Lake(record.name, record.uri)
        ids = await _ids(database, record, lake, erasure)
        await _rewrite(database, record, lake, "attempts", _any_of(ids, erasure.key), after_step)
        await _rewrite(database, record, lake, "runs", _without_name(erasure.word), after_step)
        jobs += await _rewrite(database, record, lake, "jobs", _any_of(ids, erasure.key), after_step)
        if DeltaLog(lake).exists():
            await follow(database, lake)
            after_step("delta")
        named = {file.path for kind in KINDS for file in await lakes.files(database, name, kind)}
        others = await asyncio.to_thread(_others, lake, named)
        try:
            known = sorted(ids)
            for place in range(0, max(len(known), 1), _AT_ONCE):
                await lakes.fence_lake(database, name, record.batch, erasure.subject, known[place : place + _AT_ONCE])
        except Conflict:
            if attempt == _TRIES:
                raise
            continue
        after_step("fenced")
        await asyncio.to_thread(lake.remove, others)
        after_step("others removed")
        break
    return jobs


async def follow(database: Database, lake: Lake) -> None:
    """Bring the Delta tables of a lake up to its manifest."""
    record = next(known for known in await lakes.lakes(database) if known.name == lake.name)
    for kind in KINDS:
        files = await lakes.files(database, lake.name, kind)
        await asyncio.to_thread(DeltaLog(lake).follow, kind, files, record.batch)


async def _ids(database: Database, record: LakeRecord, lake: Lake, erasure: LakeErasure) -> set[str]:
    """The ids of the jobs in a lake that belong to what is to be erased."""
    if erasure.job is not None:
        return {str(UUID(erasure.job))}
    found: set[str] = set()
    for file in await lakes.files(database, record.name, "jobs"):
        found |= await asyncio.to_thread(_ids_in, lake, file.path, erasure)
    return found


def _ids_in(lake: Lake, path: str, erasure: LakeErasure) -> set[str]:
    import pyarrow.compute as pc

    if erasure.key is not None:
        table = lake.table([path], ["id", "key"])
        return set(table.filter(pc.equal(table["key"], erasure.key))["id"].to_pylist())
    table = lake.table([path], ["id", "data"])
    # Most payloads do not contain the value at all, which needs no parser.
    perhaps = table.filter(pc.match_substring(table["data"], json.dumps(erasure.value, ensure_ascii=False)[1:-1]))
    names = str(erasure.field).split(".")
    return {
        id
        for id, data in zip(perhaps["id"].to_pylist(), perhaps["data"].to_pylist(), strict=True)
        if _at(data, names) == erasure.value
    }


def _at(data: str, names: Sequence[str]) -> str | None:
    """The scalar in a field of a payload, as the text that PostgreSQL gives for it."""
    value = json.loads(data, parse_int=str, parse_float=str)
    for name in names:
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.lstrip("-").isdigit() and -len(value) <= int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else None


def _any_of(ids: Iterable[str], key: str | None) -> Callable[[Any], Any]:
    """A function of a table of jobs or attempts: the table without these rows, or None when it has none of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = pa.array(sorted(ids), pa.string())

    def kept(table: Any) -> Any:
        gone = pc.is_in(table["id"], value_set=wanted)
        if key is not None:
            gone = pc.or_(gone, pc.fill_null(pc.equal(table["key"], key), False))
        return table.filter(pc.invert(gone)) if pc.any(gone).as_py() else None

    return kept


def _without_name(word: str) -> Callable[[Any], Any]:
    """A function of a table of runs: the table with `erased` for names that have the word, or None when none has."""
    import pyarrow as pa

    # As penstock.mentions.
    mentioned = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")

    def renamed(table: Any) -> Any:
        changed = None
        for column in ("name", "retry_of"):
            names = table[column].to_pylist()
            new = ["erased" if name is not None and mentioned.search(name) else name for name in names]
            if new != names:
                changed = table = table.set_column(table.column_names.index(column), column, pa.array(new, pa.string()))
        return changed

    return renamed


async def _rewrite(
    database: Database, record: LakeRecord, lake: Lake, kind: str, erase: Callable[[Any], Any], after_step: Callable[[str], None]
) -> int:
    """Rewrite the files of a kind that have something to erase. Returns the number of the rows that are gone."""
    gone = 0
    for file in await lakes.files(database, record.name, kind):
        new = await asyncio.to_thread(_written, lake, file, erase)
        if new is None:
            continue
        after_step(f"{kind} written")
        await lakes.erase_lake_file(database, record.name, file.path, [new] if new.rows else [])
        after_step(f"{kind} replaced")
        gone += file.rows - new.rows
    return gone


def _written(lake: Lake, file: LakeFile, erase: Callable[[Any], Any]) -> LakeFile | None:
    """A file without what is erased (with no rows it is not written); None: it has nothing of it."""
    kept = erase(lake.table([file.path]))
    if kept is None:
        return None
    if kept.num_rows == 0:
        return replace(file, rows=0, bytes=0)
    folder, _, name = file.path.rpartition("/")
    path = f"{folder}/{name.partition('-')[0]}-{datetime.now(UTC):%Y%m%d%H%M%S%f}.parquet"
    return replace(file, path=path, rows=kept.num_rows, bytes=lake.write(path, kept))


def _others(lake: Lake, named: set[str]) -> list[str]:
    """The data files below the URI that the manifest does not name."""
    return [path for path in lake.data_files() if path not in named]
