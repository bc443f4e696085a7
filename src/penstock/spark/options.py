"""Parsing the options of `format("penstock")`, checked once where they come in. docs/spark.md describes each option."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from penstock.errors import DatabaseUnavailable, InvalidInput
from penstock.jobs.spark_attempt import SparkAttempt
from penstock.postgres.embedded import EmbeddedServer
from penstock.settings import Settings

N = TypeVar("N", int, float)
OF_WRITERS = ("url", "dataDir", "writer", "epoch", "checkpointLocation", "queryName")
"""Options that all writers take."""
ALWAYS_EMPTY = "It would always be empty. Begin at earliest, at offsets or at a time, or read as a stream."
"""Hint for a batch read that begins at the end."""
NO_END = "Use Trigger.AvailableNow, or a batch read."
"""Hint for a streaming query that has an option for its end."""
_MILLISECONDS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SPAN = re.compile(rf"(\d{{1,9}})\s*({'|'.join(_MILLISECONDS)})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(ABC):
    """How to write: what a write of jobs and a write of events have in common.

    Attributes:
        place: Word for what is written to, in messages.
        events: Whether rows become events; otherwise they become jobs.
        url: URL of the database.
        writer: Name under which batches are recorded; None: the name of the query, or a new one for each batch write.
        epoch: Number of a batch write of a named writer. This number and all below are written once.
        checkpoint: Location of the checkpoint of the streaming query; None: not known. Spark passes it, except in `foreachBatch`.
        of: Attempt of a Spark job to which the write belongs; None: it belongs to none.
    """

    place: ClassVar[str]
    events: ClassVar[bool]
    url: str
    writer: str | None = None
    epoch: int | None = None
    checkpoint: str | None = None
    of: SparkAttempt | None = None

    @property
    @abstractmethod
    def target(self) -> str:
        """What is written, see `penstock.sink_epochs`."""

    @classmethod
    def _parse(cls, options: Mapping[str, str], **own: Any) -> Self:
        """From options with names in lower case, and the attributes of the subclass."""
        return cls(
            url=database_url(options),
            writer=options.get("writer"),
            epoch=number(options, "epoch", 0, 0, 2**62) if "epoch" in options else None,
            checkpoint=options.get("checkpointlocation"),
            **own,
        )


def refuse_unknown(options: Mapping[str, str], known: Sequence[str], what: str) -> None:
    """Raise `InvalidInput` for an unknown option, because a misspelt option would otherwise be ignored.

    Args:
        options: The given options, with names in lower case.
        known: Names of all options.
        what: What the options are for, such as "reading jobs".
    """
    by_lower = {name.lower(): name for name in known}
    if unknown := [name for name in options if name not in by_lower]:
        if unknown[0] == "path":
            raise InvalidInput("there is no path to read or to write", hint="Call load() and save() without one.")
        near = get_close_matches(unknown[0], by_lower, 1, 0.6)
        raise InvalidInput(
            f"there is no option {unknown[0]} for {what}",
            hint=f"Is it {by_lower[near[0]]}?" if near else f"There are: {', '.join(known)}.",
        )


def database_url(options: Mapping[str, str]) -> str:
    """The option `url`, else the URL of the environment, else that of the embedded server of `dataDir`.

    Raises:
        DatabaseUnavailable: No URL is given, and the embedded server does not run.
    """
    if given := options.get("url"):
        return given
    settings = Settings.read()
    if settings.database_url is not None and "datadir" not in options:
        return settings.database_url.get_secret_value()
    folder = Path(options.get("datadir") or settings.data_dir)
    server = EmbeddedServer(folder)
    if not server.running:
        raise DatabaseUnavailable(
            f"no option url, no PENSTOCK_DATABASE_URL, and no embedded server runs in {folder}",
            hint='Set option("url", "postgresql://..."), or start the embedded server: penstock up.',
        )
    return server.url


def flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    """An option that is true or false. Raises `InvalidInput`."""
    text = options.get(name.lower())
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        raise InvalidInput(f"the option {name} is {text!r}", hint="It is true or false.")
    return text.lower() == "true"


def number(options: Mapping[str, str], name: str, default: N, least: N, most: N) -> N:
    """An option that is a number of the type of its default, from `least` to `most`. Raises `InvalidInput`."""
    text = options.get(name.lower())
    if text is None:
        return default
    try:
        value = type(default)(text)
    except ValueError:
        raise InvalidInput(f"the option {name} is {text!r}", hint="It is a number.") from None
    if not least <= value <= most:
        raise InvalidInput(f"the option {name} is {text}", hint=f"It is between {least} and {most}.")
    return value


def span(options: Mapping[str, str], name: str, default: timedelta) -> timedelta:
    """An option that is a duration as Spark writes it: 90s, 15m. A bare number is milliseconds. Raises `InvalidInput`."""
    text = options.get(name.lower())
    if text is None:
        return default
    match = _SPAN.fullmatch(text.strip().lower())
    if match is None:
        raise InvalidInput(f"the option {name} is {text!r}", hint="It is a duration such as 500ms, 90s, 15m or 1h.")
    return timedelta(milliseconds=int(match.group(1)) * _MILLISECONDS[match.group(2) or "ms"])


def moment(name: str, text: str) -> datetime:
    """An option that is a time. Raises `InvalidInput`."""
    # Kafka's connector takes milliseconds; ISO 8601 is easier to write.
    try:
        found: Any = datetime.fromtimestamp(int(text) / 1000).astimezone() if text.isdigit() else datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        raise InvalidInput(
            f"the option {name} is {text!r}", hint="It is milliseconds since 1970, or 2026-01-31T12:00:00Z."
        ) from None
    if found.tzinfo is None:
        raise InvalidInput(f"the option {name} is {text!r}, without a time zone", hint="Add Z or +01:00.")
    return found  # type: ignore[no-any-return]


def parallelism() -> int:
    """The default number of tasks. Where a read is planned, the number of Spark's cores is not known."""
    return max(2, os.cpu_count() or 2)
