"""The calls about streams and consumer groups as data. See `calls`."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson

from penstock.client.answers import json_of, outcomes_of, reader, time_of
from penstock.client.call import Call, quoted, seconds_of
from penstock.core.checks import check_time
from penstock.core.records import from_object
from penstock.core.serialization import dump_json
from penstock.errors import InvalidInput
from penstock.jobs.models import make_id
from penstock.streams.group_models import HeldPartitions, Lag, MemberBatch, Reading
from penstock.streams.models import Event, NewEvent, Position, StreamDetails, StreamRecord, StreamSummary

_SPANS = {"keep_age", "segment_age"}


def path_of(stream: str, *rest: str) -> str:
    """A path under a stream."""
    return "/".join(["/v1/streams", quoted(stream), *rest])


def event_of(one: dict[str, Any]) -> Event[Any]:
    """An event; payloads of bytes are bytes."""
    data = one.get("data")
    if one.get("bytes") is not None:
        data = base64.b64decode(one["bytes"])
    appended_at = time_of(one["appended_at"])
    return Event(one["partition"], one["offset"], one["key"], data, one["headers"], time_of(one["time"]), appended_at)


def create(name: str, partitions: int, options: Mapping[str, Any]) -> Call[StreamRecord]:
    """Create a stream. Not repeated: the second time it is there."""
    body = {"name": name, "partitions": partitions, **_outside(options)}
    return Call("POST", "/v1/streams", reader(StreamRecord), body, repeatable=False)


def change(name: str, partitions: int | None, options: Mapping[str, Any]) -> Call[StreamRecord]:
    """Change options of a stream, or the number of its partitions."""
    body = {**({} if partitions is None else {"partitions": partitions}), **_outside(options)}
    return Call("PATCH", path_of(name), reader(StreamRecord), body)


def drop(name: str, force: bool) -> Call[None]:
    """Drop a stream. Not repeated: the second time it is not there."""
    return Call("DELETE", path_of(name), lambda _: None, params={"force": "true"} if force else {}, repeatable=False)


def describe(name: str) -> Call[StreamDetails]:
    """A stream."""
    return Call("GET", path_of(name), reader(StreamDetails))


def summary(name: str) -> Call[StreamSummary]:
    """A stream in a list."""
    return Call("GET", path_of(name), reader(StreamSummary))


def streams() -> Call[list[StreamRecord]]:
    """All streams."""
    return Call("GET", "/v1/streams", reader(list[StreamRecord]))


def _outside(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as HTTP has them: spans in seconds, with the unit in the name."""
    return {
        f"{name}_s" if name in _SPANS else name: seconds_of(value) if name in _SPANS else value for name, value in options.items()
    }


def append(name: str, event: NewEvent[Any], producer: str | None, sequence: int | None) -> Call[Position | None]:
    """Append one event; repeated only when it has a number. None: an older batch, whose place is not known any more."""

    def parse(response: Any) -> Position | None:
        found = json_of(response)
        return None if found["partition"] is None else Position(found["partition"], found["offset"])

    params = _numbered(producer, sequence)
    return Call("POST", path_of(name, "events"), parse, orjson.Fragment(_line(event)), params, repeatable=producer is not None)


def append_many(name: str, events: Iterable[Any], producer: str | None, sequence: int | None) -> Call[int | None]:
    """Append events; the result is the number of the producer's last batch. Repeated only when it has a number."""
    lines = [_line(event if isinstance(event, NewEvent) else NewEvent(event)) for event in events]

    def parse(response: Any) -> int | None:
        found = outcomes_of(response, "event", len(lines))
        return found[-1].get("sequence") if found else None

    params = _numbered(producer, sequence)
    return Call("POST", path_of(name, "events"), parse, None, params, producer is not None, b"\n".join(lines))


def read(name: str, partition: int, offset: int, limit: int, wait_s: float) -> Call[list[Event[Any]]]:
    """Events of a partition."""
    params = {"partition": str(partition), "offset": str(offset), "limit": str(limit)}
    if wait_s > 0:
        params["wait"] = f"{wait_s:.3f}s"
    return Call("GET", path_of(name, "events"), lambda r: [event_of(one) for one in json_of(r)["events"]], params=params)


def lag(name: str, group: str | None) -> Call[list[Lag]]:
    """How far a group, or each, is."""

    def parse(response: Any) -> list[Lag]:
        found = json_of(response)
        groups = [found] if group is not None else found
        return [from_object(Lag, {**one, "group": shown["group"]}) for shown in groups for one in shown["partitions"]]

    return Call("GET", path_of(name, "groups", *([] if group is None else [quoted(group)])), parse)


def seek(name: str, group: str, to: str | datetime | Mapping[int, int]) -> Call[int]:
    """Move a group."""
    if isinstance(to, datetime):
        body: dict[str, Any] = {"time": check_time("the position to start at", to)}
    elif isinstance(to, Mapping):
        body = {"offsets": {str(partition): offset for partition, offset in to.items()}}
    else:
        body = {"to": to}
    return Call("POST", path_of(name, "groups", quoted(group), "seek"), lambda r: int(json_of(r)["partitions"]), body)


def pause(name: str, group: str, word: str, partitions: Collection[int] | None, reason: str | None) -> Call[int]:
    """Pause or resume partitions."""
    body: dict[str, Any] = {"partitions": None if partitions is None else list(partitions)}
    if reason is not None:
        body["reason"] = reason
    return Call("POST", path_of(name, "groups", quoted(group), word), lambda r: int(json_of(r)["partitions"]), body)


def replay_dead(name: str, offsets: Mapping[int, int] | None, limit: int) -> Call[int]:
    """Replay dead letters. Not repeated when it names offsets, since it would replay them twice."""
    body: dict[str, Any] = {"limit": limit}
    if offsets is not None:
        body["offsets"] = {str(partition): offset for partition, offset in offsets.items()}
    path = path_of(name, "replay-dead")
    return Call("POST", path, lambda r: int(json_of(r)["replayed"]), body, repeatable=offsets is None)


def drop_group(name: str, group: str) -> Call[None]:
    """Forget a group."""
    return Call("DELETE", path_of(name, "groups", quoted(group)), lambda _: None)


@dataclass(frozen=True, slots=True)
class MemberCalls:
    """A membership: its calls."""

    stream: str
    group: str
    id: str
    session: UUID

    def _path(self, *rest: str) -> str:
        return path_of(self.stream, "groups", quoted(self.group), "members", quoted(self.id), *rest)

    @classmethod
    def new(cls, stream: str, group: str, id: str | None) -> MemberCalls:
        """A new membership; the session is made here, so that the join can be repeated."""
        session = make_id()
        return cls(stream, group, id or f"member.{session.hex[-12:]}", session)

    def join(self, start: str, dead_after_s: float, metadata: Mapping[str, Any] | None) -> Call[None]:
        """Join."""
        body = {"session": str(self.session), "start": start, "dead_after_s": dead_after_s, "metadata": dict(metadata or {})}
        return Call("PUT", self._path(), lambda _: None, body)

    def read(
        self, limit: int, wait_s: float, busy: Collection[int], ahead: Mapping[int, int], auto_offset_reset: str
    ) -> Call[Reading]:
        """Read on."""
        body: dict[str, Any] = {
            "session": str(self.session),
            "limit": limit,
            "busy": list(busy),
            "auto_offset_reset": auto_offset_reset,
        }
        body["ahead"] = {str(partition): offset for partition, offset in ahead.items()}
        if wait_s > 0:
            body["wait"] = f"{wait_s:.3f}s"
        return Call("POST", self._path("read"), _reading, body)

    def commit(self, batches: Iterable[MemberBatch]) -> Call[dict[int, bool]]:
        """Commit."""
        commits = [
            {"partition": one.partition, "epoch": one.epoch, "revision": one.revision, "next_offset": one.next_offset}
            for one in batches
        ]

        def parse(response: Any) -> dict[int, bool]:
            return {int(at): outcome == "committed" for at, outcome in json_of(response)["outcomes"].items()}

        return Call("POST", self._path("commit"), parse, {"commits": commits})

    def fail(self, batch: MemberBatch, error: str, attempt: int) -> Call[bool]:
        """Note a failure."""
        body = {
            "partition": batch.partition,
            "epoch": batch.epoch,
            "revision": batch.revision,
            "offset": batch.events[0].offset if batch.events else batch.first_offset,
            "attempt": attempt,
            "error": error[:10_000],
        }
        return Call("POST", self._path("failures"), lambda response: bool(json_of(response)["noted"]), body)

    def heartbeat(self) -> Call[HeldPartitions]:
        """Beat."""
        return Call("POST", self._path("heartbeat"), reader(HeldPartitions), {"session": str(self.session)})

    def leave(self) -> Call[None]:
        """Leave. Not repeated: the second time it is no member."""
        return Call("DELETE", self._path(), lambda _: None, params={"session": str(self.session)}, repeatable=False)


def _reading(response: Any) -> Reading:
    found = json_of(response)
    batches = [MemberBatch(**{**batch, "events": [event_of(one) for one in batch["events"]]}) for batch in found["batches"]]
    return Reading({int(at): epoch for at, epoch in found["partitions"].items()}, found["revoked"], batches)


def _numbered(producer: str | None, sequence: int | None) -> dict[str, str]:
    if (producer is None) != (sequence is None):
        raise InvalidInput("producer and sequence go together", hint="Give both, or none of them.")
    return {} if producer is None else {"producer": producer, "sequence": str(sequence)}


def _line(event: NewEvent[Any]) -> bytes:
    fields: dict[str, Any] = {}
    if isinstance(event.data, (bytes, bytearray, memoryview)):
        fields["bytes"] = base64.b64encode(event.data).decode()
    else:
        fields["data"] = orjson.Fragment(dump_json(event.data, "the event"))
    if event.key is not None:
        fields["key"] = event.key
    if event.headers:
        fields["headers"] = dict(event.headers)
    if event.time is not None:
        fields["time"] = check_time("time of an event", event.time)
    return orjson.dumps(fields)
