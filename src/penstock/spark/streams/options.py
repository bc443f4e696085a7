"""The options of reading and writing streams, by Kafka's names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import ClassVar, TypeAlias

from penstock.errors import InvalidInput
from penstock.spark.json import times
from penstock.spark.options import OF_WRITERS, WriteOptions, database_url, flag, moment, number, refuse_unknown, span
from penstock.spark.streams import offsets as stream_offsets
from penstock.spark.streams.offsets import Offsets, Place, Since

Where: TypeAlias = str | Since | Offsets
"""`earliest`, `latest`, times, or offsets."""
SELECTORS = ("subscribe", "subscribepattern", "assign")
_MODES = ("PERMISSIVE", "FAILFAST")
_KNOWN = (
    "url", "dataDir", "subscribe", "subscribePattern", "assign", "columns", "includeHeaders", "pushdown", "mode", "timeZone",
    "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy",
    "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "failOnDataLoss", "maxOffsetsPerTrigger",
    "maxRowsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "rowsPerPartition", "waitS",
)  # fmt: skip
_STRATEGIES = ("error", "latest")


@dataclass(frozen=True, slots=True)
class EventReadOptions:
    """How to read streams.

    Attributes:
        url: URL of the database.
        names: Streams to read; None: all streams whose names match `pattern`.
        pattern: Regular expression for whole names.
        assigned: Partitions to read; None: all.
        columns: Names of columns, separated by commas; None: all.
        include_headers: Whether the column `headers` exists.
        pushdown: Whether the database evaluates filters.
        starting, ending: Where to begin and to end; None: the default of the kind of read.
        fail_on_data_loss: Whether it is an error when events were dropped before they were read.
        most: Largest number of events in a micro-batch; None: no limit.
        least: Number of events for which a micro-batch waits; None: one.
        delay: How long after the previous micro-batch it waits for `least` events.
        min_partitions: Smallest number of tasks, as far as there are events.
        rows_per_partition: Approximate number of events of one task.
        wait: How long an idle query waits for a notification before it returns to Spark.
        fail_fast: Whether a payload that does not fit the given schema is an error; otherwise its fields are null.
        zone: Zone of times in payloads that name none.
        identities: The identities of the streams that the given offsets are of, as far as they come from a checkpoint.
        whole: Which of the options `startingOffsets` and `endingOffsets` come from a checkpoint: these name all that there was.
    """

    url: str
    names: tuple[str, ...] | None
    pattern: re.Pattern[str] | None
    assigned: frozenset[tuple[str, int]] | None
    columns: str | None
    include_headers: bool
    pushdown: bool
    starting: Where | None
    ending: Where | None
    fail_on_data_loss: bool
    most: int | None
    least: int | None
    delay: timedelta
    min_partitions: int
    rows_per_partition: int
    wait: timedelta
    fail_fast: bool
    zone: tzinfo
    identities: Mapping[str, str]
    whole: frozenset[str]

    @property
    def ends_at_start(self) -> bool:
        """Whether the read begins at the end of some or all partitions."""
        return self.starting == "latest" or (isinstance(self.starting, dict) and stream_offsets.LATEST in self.starting.values())

    @classmethod
    def wanted(cls, given: Mapping[str, str]) -> bool:
        """Whether these options say that streams are read."""
        return any(name.lower() in SELECTORS for name in given)

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> EventReadOptions:
        """From the options of a reader. Raises `InvalidInput`."""
        options = {name.lower(): value for name, value in given.items()}
        if foreign := next((name for name in options if name.startswith(("kafka.", "groupidprefix"))), None):
            raise InvalidInput(
                f"the option {foreign} is for Kafka's brokers", hint="There are none: the option url says where the database is."
            )
        refuse_unknown(options, (*_KNOWN, "table"), "reading streams")
        if "table" in options:
            raise InvalidInput("table and a subscription exclude each other", hint="Read a table or streams.")
        names, pattern, assigned = _selection(options)
        mode = options.get("mode", "PERMISSIVE").upper()
        if mode not in _MODES:
            raise InvalidInput(f"the option mode is {mode!r}", hint=f"It is {' or '.join(_MODES)}, as for Spark's from_json.")
        if (given_most := options.get("maxrowspertrigger")) is not None:
            options.setdefault("maxoffsetspertrigger", given_most)
        most = number(options, "maxOffsetsPerTrigger", 0, 1, 10**9) or None
        least = number(options, "minOffsetsPerTrigger", 0, 1, 10**9) or None
        if least is not None and most is not None and least > most:
            raise InvalidInput(
                f"minOffsetsPerTrigger is {least}, more than maxOffsetsPerTrigger, {most}", hint="Make it at most as large."
            )
        starting, ending = _where(options, "starting"), _where(options, "ending")
        given_offsets = [
            options[f"{side}offsets"] for side, where in (("starting", starting), ("ending", ending)) if isinstance(where, dict)
        ]
        return cls(
            url=database_url(options),
            names=names,
            pattern=pattern,
            assigned=assigned,
            columns=options.get("columns"),
            include_headers=flag(options, "includeHeaders", True),
            pushdown=flag(options, "pushdown", False),
            starting=starting,
            ending=ending,
            fail_on_data_loss=flag(options, "failOnDataLoss", True),
            most=most,
            least=least,
            delay=span(options, "maxTriggerDelay", timedelta(minutes=15)),
            min_partitions=number(options, "minPartitions", 1, 1, 10_000),
            rows_per_partition=number(options, "rowsPerPartition", 250_000, 1, 10_000_000),
            wait=timedelta(seconds=number(options, "waitS", 2.0, 0.0, 60.0)),
            fail_fast=mode == "FAILFAST",
            zone=times.zone(options.get("timezone", "UTC")),
            identities={k: v for text in given_offsets for k, v in stream_offsets.identities_of(json.loads(text)).items()},
            whole=frozenset(
                name
                for name, where in (("startingOffsets", starting), ("endingOffsets", ending))
                if isinstance(where, dict) and stream_offsets.STREAMS in json.loads(options[name.lower()])
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventWriteOptions(WriteOptions):
    """How to write events.

    Attributes:
        stream: Stream of all rows; None: the column `topic` has it.
    """

    place: ClassVar[str] = "stream"
    events: ClassVar[bool] = True
    stream: str | None = None

    @classmethod
    def wanted(cls, given: Mapping[str, str], columns: Collection[str]) -> bool:
        """Whether options and columns say that events are written, and not jobs."""
        options = {name.lower() for name in given}
        return "job" not in options and (bool(options & {"stream", "topic"}) or "value" in columns)

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> EventWriteOptions:
        """From the options of a writer. Raises `InvalidInput`."""
        options = {name.lower(): value for name, value in given.items()}
        refuse_unknown(options, (*OF_WRITERS, "stream", "topic"), "writing events")
        if options.keys() >= {"stream", "topic"}:
            raise InvalidInput("the options stream and topic mean the same", hint="Give one of them.")
        return cls._parse(options, stream=options.get("stream", options.get("topic")))

    @property
    def target(self) -> str:
        """What is written, see `penstock.sink_epochs`."""
        return "streams" if self.stream is None else f"stream {self.stream}"


def _selection(
    options: Mapping[str, str],
) -> tuple[tuple[str, ...] | None, re.Pattern[str] | None, frozenset[tuple[str, int]] | None]:
    chosen = [name for name in SELECTORS if name in options]
    if len(chosen) != 1:
        raise InvalidInput(f"{' and '.join(chosen)} exclude each other", hint="Give one of subscribe, subscribePattern, assign.")
    text = options[chosen[0]]
    if chosen[0] == "subscribepattern":
        try:
            return None, re.compile(text), None
        except re.error as error:
            raise InvalidInput(f"the option subscribePattern is {text!r}: {error}", hint="It is a regular expression.") from None
    if chosen[0] == "assign":
        places = _places(text)
        return tuple(sorted({stream for stream, _ in places})), None, places
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidInput("the option subscribe is empty", hint="It lists names of streams, separated by commas.")
    return names, None, None


def _places(text: str) -> frozenset[tuple[str, int]]:
    hint = 'It looks like {"orders": [0, 1], "refunds": [0]}.'
    try:
        places = frozenset((stream, int(number)) for stream, numbers in json.loads(text).items() for number in numbers)
    except (ValueError, AttributeError, TypeError):
        raise InvalidInput(f"the option assign is {text[:100]!r}", hint=hint) from None
    if not places:
        raise InvalidInput("the option assign names no partition", hint=hint)
    return places


def _where(options: Mapping[str, str], side: str) -> Where | None:
    names = [f"{side}Offsets", f"{side}Timestamp", f"{side}OffsetsByTimestamp"]
    given = [name for name in names if name.lower() in options]
    # Kafka's source lets one of them take precedence; here they exclude each other.
    if len(given) > 1:
        raise InvalidInput(f"{' and '.join(given)} exclude each other", hint="Give one of them.")
    if not given:
        return None
    (name,) = given
    text = options[name.lower()]
    if name == names[0]:
        if text.lower() == "latest" or (text.lower() == "earliest" and side == "starting"):
            return text.lower()
        return stream_offsets.parse(text, name)
    if name == names[1]:
        return Since(moment(name, text), strict=_strict(options, side, "latest"))
    return Since(times=_times(name, text), strict=_strict(options, side, "error"))


def _times(name: str, text: str) -> dict[Place, datetime]:
    hint = 'It looks like {"orders": {"0": 1767225600000, "1": "2026-01-31T12:00:00Z"}}: milliseconds since 1970, or ISO 8601.'
    times = {}
    for place, value in stream_offsets.by_place(text, name, hint).items():
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            raise InvalidInput(f"the option {name} has the time {value!r} for partition {place[1]} of {place[0]}", hint=hint)
        times[place] = moment(name, str(value))
    return times


def _strict(options: Mapping[str, str], side: str, default: str) -> bool:
    """Whether a partition without an event since the given time is an error. It never is at the end of a read."""
    if side != "starting":
        return False
    strategy = options.get("startingoffsetsbytimestampstrategy", default).lower()
    if strategy not in _STRATEGIES:
        raise InvalidInput(
            f"the option startingOffsetsByTimestampStrategy is {strategy!r}", hint=f"It is {' or '.join(_STRATEGIES)}."
        )
    return strategy == "error"
