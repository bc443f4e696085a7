"""The dead letters of a stream: what failed where and why, and their replay."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.errors import InvalidInput, OffsetGone
from penstock.http.dashboard.pages.streams import (
    EVENTS_ON_A_PAGE,
    DeadLetters,
    beginning_of,
    chunks_of,
    dead_letters_of,
    number_of,
    parsed_events,
    record_of,
    shown_text,
)
from penstock.http.dashboard.view import Action, Done, Page, Shown, View, segment
from penstock.streams import group_queries

_MOST_REPLAYED = 1_000
# So many one call replays.
_MOST_OF_A_CALL = 100_000


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter.

    Attributes:
        offset: Its offset among the dead letters.
        key: Key of the event.
        data: The event.
        group: The consumer group in which it failed.
        at: Partition and offset of the event in its stream; None: it does not say.
        error: Why it failed.
        failed_at: When.
        replayed: Whether it was replayed.
        erased: Whether it is the mark of an erased event, which is no letter.
    """

    offset: int
    key: str | None
    data: str
    group: str
    at: tuple[int, int] | None
    error: str
    failed_at: datetime | None
    replayed: bool
    erased: bool


async def show(view: View) -> Shown:
    """The dead letters of a partition, the newest page first."""
    record = await record_of(view)
    dead = await dead_letters_of(view, record)
    partition, letters, offset, problem = 0, [], 0, ""
    if dead is not None:
        partition = number_of(view.query.get("partition", ""), 0)
        if partition not in dead.bounds:
            problem = f"There is no partition {partition}."
        else:
            edge = dead.bounds[partition]
            newest = max(edge.next - EVENTS_ON_A_PAGE, edge.first)
            offset = min(max(number_of(view.query.get("offset", ""), newest), edge.first), edge.next)
            try:
                letters = await _letters(view, dead, partition, offset)
            except OffsetGone:
                problem = "Retention has dropped these letters meanwhile."
    return Shown(
        f"Dead letters of {record.name}",
        "dead_letters.html",
        {
            "stream": record, "dead": dead, "letters": letters[::-1], "partition": partition, "offset": offset,
            "edge": None if dead is None else dead.bounds.get(partition), "missing": problem, "most": EVENTS_ON_A_PAGE,
            "begin": None if dead is None or partition not in dead.bounds else dead.begin(partition),
        },
    )  # fmt: skip


async def replay(view: View) -> Done:
    """Append dead letters to the stream again, for the group in which they failed: the next ones, or up to one, or one again."""
    record = await record_of(view)
    partition, offset = view.number("partition"), view.number("offset")
    database = await view.database()
    limit, offsets, before = _MOST_REPLAYED, None, None
    told: dict[str, Any] = {}
    if partition is not None and offset is not None:
        dead = await dead_letters_of(view, record)
        edge = None if dead is None else dead.bounds.get(partition)
        if dead is None or edge is None or not edge.first <= offset < edge.next:
            raise InvalidInput(f"there is no dead letter {offset} of partition {partition}", hint="Load the page again.")
        # The replay counts by offsets: one that is ahead takes those before it along, and none is passed over.
        first = min(dead.begin(partition), offset)
        limit, offsets, before = offset - first + 1, {partition: first}, [offset + 1]
        if limit > _MOST_OF_A_CALL:
            raise InvalidInput(f"{limit:,} letters are too many at once", hint="Replay the next 1,000 first.")
        told = {"partition": partition, "offset": offset}
    async with view.changing("replay dead letters", stream=record.name, **told) as changed:
        number = await group_queries.replay_dead(database, record.name, limit, offsets, before)
        changed(number)
    return Done(f"streams/{segment(record.name)}/dead", f"{number} dead letters were appended again.")


async def _letters(view: View, dead: DeadLetters, partition: int, offset: int) -> list[Letter]:
    edge, record = dead.bounds[partition], dead.record
    chunks = await chunks_of(view, record.name, partition, offset, edge)
    begin = dead.begin(partition)
    return [_letter(view, record.name, event, begin) for event in parsed_events(record, chunks, offset)]


def _letter(view: View, name: str, event: dict[str, Any], begin: int) -> Letter:
    headers = event.get("headers")
    about = headers.get("dead") if isinstance(headers, dict) else None
    # All who may append can write such headers.
    told: dict[str, Any] = about if isinstance(about, dict) else {}
    partition, offset = told.get("partition"), told.get("offset")
    erasure = headers.get("erased") if isinstance(headers, dict) else None
    at = (partition, offset) if isinstance(partition, int) and isinstance(offset, int) else None
    return Letter(
        event["offset"],
        event.get("key"),
        shown_text(view, name, event["bytes"] if "bytes" in event else event.get("data")),
        beginning_of(str(told.get("group", ""))),
        at,
        beginning_of(view.masking.text(name, str(told.get("error", ""))) or ""),
        _moment(told.get("failed_at")),
        event["offset"] < begin,
        isinstance(erasure, dict) and "operation" in erasure,
    )


def _moment(value: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo is not None else None


PAGES = [Page("streams/{name}/dead", show)]
ACTIONS = [Action("streams/{name}/replay-dead", replay)]
