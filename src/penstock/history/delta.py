"""The lake as Delta tables, with transactions, time travel and vacuum. Needs the extra `delta`, but no JVM.

The manifest in Postgres names the files of the lake, and the log of Delta follows it. `follow` compares the two and commits the
difference, as one transaction for each kind of file, with the number of the lake's last batch. When a crash comes between a
batch and `follow`, the next `follow` includes that batch. A compaction is a transaction too, which replaces files without
changing data. The replaced files stay for time travel, until `vacuum`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from penstock.core.extras import needs
from penstock.errors import NotFound
from penstock.history.lake import KINDS, Lake
from penstock.history.lake_queries import LakeFile

if TYPE_CHECKING:
    import deltalake


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a table of the lake, which can still be read."""

    kind: str
    version: int
    batch: int | None
    at: datetime
    files: int


class DeltaLog:
    """The Delta tables of a lake: one for each kind of file, in the folder of that name."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._app = f"penstock {lake.name}"

    def exists(self) -> bool:
        """Whether the lake has Delta tables. The answer does not need the extra `delta`."""
        return self._lake.has("jobs/_delta_log")

    def follow(self, kind: str, files: Sequence[LakeFile], batch: int) -> int | None:
        """Bring the table of a kind up to the manifest.

        Args:
            kind: Kind of files.
            files: The files of the manifest.
            batch: The lake's last batch.

        Returns:
            The version of the table; None when it has no files yet.
        """
        delta = delta_package()
        table = self._table(kind)
        known = {} if table is None else self._known(table)
        wanted = {file.path.removeprefix(f"{kind}/"): file for file in files}
        added = [wanted[path] for path in sorted(wanted.keys() - known.keys())]
        gone = sorted(known.keys() - wanted.keys())
        noted = None if table is None else table.transaction_version(self._app)
        if not added and not gone and (noted == batch or not known):
            return None if table is None else int(table.version())
        if table is None:
            schema = self._lake.schema(files[0].path)
            table = delta.DeltaTable.create(
                f"{self._lake.uri}/{kind}", schema, partition_by=["day", "type"], name=f"penstock {kind}"
            )
        # A compaction writes the same rows to other files, so readers that follow changes must not see it.
        moved = bool(gone)
        actions: list[Any] = [_add(kind, file, not moved) for file in added]
        actions += [_remove(path, known[path], not moved) for path in gone]
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            ["day", "type"],
            commit_properties=delta.CommitProperties(
                custom_metadata={"batch": str(batch)}, app_transactions=[delta.Transaction(self._app, batch)]
            ),
        )
        return int(self._required(kind).version())

    def versions(self, kind: str, limit: int = 50) -> list[Version]:
        """The latest versions of a table, newest first. Raises `NotFound`."""
        found = []
        for entry in self._required(kind).history(limit):
            version = int(entry["version"])
            files = len(self._required(kind, version).file_uris())
            batch = entry.get("batch")
            moment = datetime.fromtimestamp(entry["timestamp"] / 1000, UTC)
            found.append(Version(kind, version, None if batch is None else int(batch), moment, files))
        return found

    def files(self, kind: str, version: int | None = None) -> list[str]:
        """URIs of the files of a version of a table; None: the latest. Raises `NotFound`."""
        return [uri if "://" in uri else f"file://{uri}" for uri in self._required(kind, version).file_uris()]

    def vacuum(self, keep: timedelta = timedelta(days=7)) -> int:
        """Delete files that no version of the last `keep` has, and with them older versions. Returns the number of files."""
        return sum(
            len(table.vacuum(int(keep / timedelta(hours=1)), dry_run=False, enforce_retention_duration=False))
            for kind in KINDS
            if (table := self._table(kind)) is not None
        )

    def _known(self, table: deltalake.DeltaTable) -> dict[str, dict[str, Any]]:
        import pyarrow as pa

        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        return {unquote(action["path"]): action for action in actions}

    def _table(self, kind: str, version: int | None = None) -> deltalake.DeltaTable | None:
        delta = delta_package()
        uri = f"{self._lake.uri}/{kind}"
        return delta.DeltaTable(uri, version=version) if delta.DeltaTable.is_deltatable(uri) else None

    def _required(self, kind: str, version: int | None = None) -> deltalake.DeltaTable:
        try:
            table = self._table(kind, version)
        except Exception as error:
            if version is None:
                raise
            raise NotFound(f"{kind} has no version {version}: {error}", hint="See: penstock history versions") from None
        if table is None:
            raise NotFound(
                f"the lake {self._lake.name} has no Delta table of {kind}", hint="Create it: penstock history run --delta"
            )
        return table


def delta_package() -> Any:
    """The package `deltalake`. Raises `MissingExtra`."""
    with needs("delta", "a Delta table"):
        import deltalake
    return deltalake


def _add(kind: str, file: LakeFile, changes: bool) -> Any:
    from deltalake.transaction import AddAction

    return AddAction(
        file.path.removeprefix(f"{kind}/"),
        file.bytes,
        {"day": file.day.isoformat(), "type": file.type},
        int(time.time() * 1000),
        changes,
        json.dumps({"numRecords": file.rows}),
    )


def _remove(path: str, action: dict[str, Any], changes: bool) -> Any:
    from deltalake.transaction import RemoveAction

    day, type = action["partition.day"], action["partition.type"]
    moment = int(time.time() * 1000)
    return RemoveAction(path, changes, moment, size=action["size_bytes"], partition_values={"day": str(day), "type": type})
