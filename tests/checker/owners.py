"""The checker of ownership: a slot has one owner at a time, and only the owner begins work in it (P4, P6).

The database notes each change of an owner. A worker that was suspended, or could not reach the database, learns of a loss when it
is back: from then on it has `THAW_S` to notice, and begins nothing in the slot after that, whether another owner works there at
this moment or not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.checker.history import SLACK_S, THAW_S, Gone
from tests.checker.noted import overlap
from tests.checker.tables import pid_of

NOTE_OWNERS = """
create table public.chaos_owners (
    n bigserial, at timestamptz not null default clock_timestamp(), group_name text, slot integer, owner text, epoch bigint,
    owner_before text, epoch_before bigint
);
create function public.chaos_note_owner() returns trigger language plpgsql security definer as $do$
begin
    insert into public.chaos_owners (group_name, slot, owner, epoch, owner_before, epoch_before)
    values (new.group_name, new.slot, new.owner, new.epoch, old.owner, old.epoch);
    return null;
end
$do$;
create trigger chaos_note_owner after update on penstock.slots for each row
when (new.owner is distinct from old.owner) execute function public.chaos_note_owner();
"""


@dataclass(frozen=True, slots=True)
class Owned:
    """A slot of a membership group got an owner (a member), or lost it ("").

    `before` is the previous owner, if it had not released the slot; `worker` is the process of the new owner.
    """

    at: float
    group: str
    slot: int
    owner: str
    epoch: int
    before: str = ""
    epoch_before: int = 0
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """A worker began something in a slot: the run of a job, or a batch of events."""

    what: str
    group: str
    slot: int
    worker: str
    at: float


async def owners(database: Any, difference: float) -> list[Owned]:
    """All changes of owners, in their order."""
    found = await database.fetch(
        "select extract(epoch from at)::float8 as at, group_name, slot, owner, epoch, owner_before, epoch_before"
        " from public.chaos_owners order by n"
    )
    return [
        Owned(
            row["at"] + difference, row["group_name"], row["slot"], row["owner"] or "", row["epoch"], row["owner_before"] or "",
            row["epoch_before"], pid_of(row["owner"] or ""),
        )
        for row in found
    ]  # fmt: skip


def check_owners(owned: Iterable[Owned]) -> Iterable[str]:
    """A slot has one owner at a time, until the owner releases it or is evicted; each ownership has an epoch of its own."""
    for each in owned:
        if each.owner and each.before:
            yield f"P4: slot {each.slot} of {each.group} was taken by {each.owner} while {each.before} had it"
        if each.owner and each.epoch <= each.epoch_before:
            yield f"P4: slot {each.slot} of {each.group} was taken by {each.owner} under the epoch {each.epoch}, which is not new"


def check_begun(begun: Iterable[Begun], owned: Iterable[Owned], absences: Sequence[Gone]) -> Iterable[str]:
    """Only the owner of a slot begins work in it; a worker that lost it while it was away, for `THAW_S` after its return.

    Args:
        begun: What workers began.
        owned: The changes of owners, in their order.
        absences: When worker processes were suspended or not scheduled, or could not reach the database (worker "": all).
    """
    changes: dict[tuple[str, int], list[Owned]] = defaultdict(list)
    for each in owned:
        changes[each.group, each.slot].append(each)
    for work in begun:
        own = changes[work.group, work.slot]
        times = [each.at for each in own]
        # The clocks differ a little, and a take is noted before it is committed.
        earliest, latest = max(bisect_right(times, work.at - SLACK_S) - 1, 0), bisect_right(times, work.at + SLACK_S)
        if any(each.worker == work.worker for each in own[earliest:latest]):
            continue
        held = [place for place, each in enumerate(own[:latest]) if each.worker == work.worker]
        if not held:
            yield f"P4: {work.what} began on {work.worker} at {work.at:.3f}, which never had slot {work.slot} of {work.group}"
            continue
        lost_at = own[held[-1] + 1].at
        away = [(gone.at, gone.back) for gone in absences if gone.worker in ("", work.worker)]
        awake = work.at - lost_at - overlap(away, lost_at, work.at)
        if awake > THAW_S:
            yield (
                f"P4: {work.what} began on {work.worker} at {work.at:.3f}, {awake:.3f} s after that had lost slot {work.slot}"
                f" of {work.group}"
            )
