"""Checks of what users give for streams and their groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from penstock.core.checks import check_flag, check_many, check_number, check_time
from penstock.core.keys import check_key
from penstock.errors import InvalidInput
from penstock.streams.models import Retention, StreamOptions

_STREAM = re.compile(r"(?![.]{1,2}$)[A-Za-z0-9_.-]{1,100}|[A-Za-z0-9_.-]{1,100}[.]dead")
_GROUP = re.compile(r"(?![.]{1,2}$)[A-Za-z0-9_.-]{1,90}")


def check_offsets(offsets: Mapping[int, int]) -> None:
    """Raise `InvalidInput` unless these are partitions and offsets."""
    if not isinstance(offsets, Mapping):
        raise InvalidInput(f"offsets must be a mapping from partitions, not {offsets!r:.100}", hint="For example: {0: 17}")
    for partition, offset in offsets.items():
        check_number("a partition in offsets", partition, 0, 1_023)
        check_number(f"the offset of partition {partition}", offset, 0, 2**63 - 1)


def check_start(start: Any) -> None:
    """Raise `InvalidInput` unless a reader can start here: at an end, at a time, or at offsets by partition."""
    if isinstance(start, datetime):
        check_time("the position to start at", start)
    elif isinstance(start, Mapping):
        check_offsets(start)
    elif not isinstance(start, str) or start not in ("earliest", "latest"):
        raise InvalidInput(
            f"the position to start at cannot be {start!r:.100}", hint='Use "earliest", "latest", a time, or {partition: offset}.'
        )


def check_stream(
    name: Any,
    payload: Any,
    partitions: Any,
    key: Any,
    key_optional: Any,
    keep: Any,
    options: StreamOptions,
) -> None:
    """Raise `InvalidInput` unless these are valid options of a stream."""
    check_stream_name(name)
    what = f"stream {name}"
    check_number(f"partitions of {what}", partitions, 1, 1_024)
    check_flag(f"key_optional of {what}", key_optional)
    if not isinstance(keep, Retention):
        raise InvalidInput(
            f"keep of {what} must be a timedelta or a Retention, not {keep!r:.100}", hint="For example: keep=timedelta(days=7)"
        )
    options.check()
    keep.check()
    check_key(what, payload, key)


def check_stream_name(name: Any) -> None:
    """Raise `InvalidInput` unless this is a valid name of a stream."""
    if not isinstance(name, str) or not _STREAM.fullmatch(name):
        raise InvalidInput(
            f"invalid stream name: {name!r:.100}",
            hint='A stream name has 1 to 100 letters, digits, ".", "-" or "_" (that of dead letters ".dead" after them), and is'
            ' not "." or "..".',
        )


def check_partitions(partitions: Any) -> None:
    """Raise `InvalidInput` unless these are numbers of partitions, or None."""
    if partitions is not None:
        check_many("partitions", partitions, "partitions=[0, 3]")
        for partition in partitions:
            check_number("a partition in partitions", partition, 0, 1_023)


def check_group(group: Any) -> None:
    """Raise `InvalidInput` unless this is a valid name of a consumer group."""
    if not isinstance(group, str) or not _GROUP.fullmatch(group):
        raise InvalidInput(
            f"invalid name of a consumer group: {group!r:.100}",
            hint='A consumer group has 1 to 90 letters, digits, ".", "-" or "_", and is not "." or "..".',
        )
