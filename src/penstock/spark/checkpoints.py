"""Checkpoints of Spark's streaming queries, as files. Needs no JVM.

A checkpoint has the id of its query (`metadata`) and, for each of the last hundred batches, how far each source had been read
(`offsets/N`), which Spark writes before the batch begins; `commits/N` is there when the batch is done.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from penstock.core.extras import needs
from penstock.errors import NotFound
from penstock.history.lake import uri_of


class Folder:
    """A folder on any storage."""

    def __init__(self, uri: str) -> None:
        with needs("spark", "a look at checkpoints"):
            import pyarrow.fs
        self._files, self._root = pyarrow.fs.FileSystem.from_uri(uri)

    def numbers(self, name: str) -> list[int]:
        """The numbers after which files in a folder below are named, in order."""
        import pyarrow.fs

        found = self._files.get_file_info(pyarrow.fs.FileSelector(f"{self._root}/{name}", allow_not_found=True))
        return sorted(int(info.base_name) for info in found if info.base_name.isdigit())

    def text(self, name: str) -> str | None:
        """The text of a file; None: there is none."""
        import pyarrow.fs

        if self._files.get_file_info(f"{self._root}/{name}").type is pyarrow.fs.FileType.NotFound:
            return None
        with self._files.open_input_stream(f"{self._root}/{name}") as stream:
            return str(stream.read().decode())

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        with self._files.open_output_stream(f"{self._root}/{name}") as stream:
            stream.write(text.encode())

    def remove(self, name: str) -> None:
        """Delete a file, and the checksum that Hadoop keeps beside it; one that is gone already is no error."""
        folder, _, base = name.rpartition("/")
        for each in (name, f"{folder}/.{base}.crc"):
            try:
                self._files.delete_file(f"{self._root}/{each}")
            except FileNotFoundError:
                continue


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint.

    Attributes:
        uri: Location.
        folder: Its files.
        query: Id of the query; None: the checkpoint has none.
        batches: Numbers of the batches that were planned, of which Spark keeps the last hundred.
    """

    uri: str
    folder: Folder
    query: str | None
    batches: list[int]

    @classmethod
    def of(cls, place: str) -> Self:
        """The checkpoint in a folder or at a URI.

        Raises:
            NotFound: There is none.
        """
        uri = uri_of(place)
        folder = Folder(uri)
        batches = folder.numbers("offsets")
        metadata = folder.text("metadata")
        if not batches and metadata is None:
            raise NotFound(f"there is no checkpoint at {uri}", hint="Give the folder that the option checkpointLocation names.")
        return cls(uri, folder, None if metadata is None else json.loads(metadata.splitlines()[-1]).get("id"), batches)

    def sources(self, batch: int) -> list[Any] | None:
        """How far a batch reads each source, see `sources_of`; None: the batch is not there."""
        text = self.folder.text(f"offsets/{batch}")
        return None if text is None else sources_of(text)


def sources_of(text: str) -> list[Any]:
    """How far a batch reads each source, from the text of its file; None for a source that was not read."""
    # A version and the settings come first, then a line for each source: a hyphen if nothing has been read from it.
    return [None if line == "-" else _parsed(line) for line in text.splitlines()[2:]]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        # The position of a source that does not keep it as JSON.
        return line
