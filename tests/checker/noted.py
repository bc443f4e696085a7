"""The changes that the database made, noted by triggers in the same transactions: the database decides who owns a job.

A worker that counts as dead while its process runs (its heartbeats did not arrive) has lost its jobs, whatever the process
records. The checkers therefore judge by these notes who may run a job, and separately whether the database was right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.checker.history import SLACK_S, THAW_S, Gone, Run

TOLD_S = 5.0
"""Seconds within which a worker that was declared dead, and has registered again, must end the jobs that it ran."""

PASSED_OVER_S = 15.0
"""Seconds for which later jobs may pass a job that is queued again: workers make a full scan only at intervals."""

AT_ONCE_S = 5.0
"""What is claimed within such a time, in one batch or by workers that claim beside each other, has no order."""

ALONE_S = 60.0
"""In this time a suspect has run alone, less the time in which others of its kind did."""

TICK_S = 0.4
"""A process that was not scheduled for longer than this was away for that time."""

NOTE = """
create table public.chaos_notes (
    n bigserial, at timestamptz not null default clock_timestamp(), what text, id uuid, name text, number integer, lease bigint,
    worker text, seq bigint, priority integer, crashes integer, silent_s float8, dead_after_s float8, pid integer
);

create function public.chaos_note_job() returns trigger language plpgsql security definer as $do$
begin
    if tg_op = 'DELETE' then
        insert into public.chaos_notes (what, id, name, number, lease)
        values ('over', old.id, old.name, old.attempt, old.lease);
    else
        insert into public.chaos_notes (what, id, name, number, lease, seq, priority, crashes)
        values (
            case when new.status <> old.status and new.status = 'queued' then 'back'
                when new.status <> old.status then 'claimed' else 'begun' end,
            old.id, old.name, old.attempt, coalesce(old.lease, new.lease), new.seq, new.priority,
            new.crashes
        );
    end if;
    return null;
end
$do$;
create trigger chaos_note_update after update on penstock.queued_jobs for each row
when (new.status is distinct from old.status or new.begun and not old.begun) execute function public.chaos_note_job();
create trigger chaos_note_delete after delete on penstock.queued_jobs for each row execute function public.chaos_note_job();

create function public.chaos_note_lease() returns trigger language plpgsql security definer as $do$
begin
    insert into public.chaos_notes (what, lease, worker) values ('leased', new.id, new.worker);
    return null;
end
$do$;
create trigger chaos_note_lease after insert on penstock.leases for each row execute function public.chaos_note_lease();

create function public.chaos_note_worker() returns trigger language plpgsql security definer as $do$
declare
    stack text;
begin
    get diagnostics stack = pg_context;
    insert into public.chaos_notes (what, worker, pid, silent_s, dead_after_s)
    values (
        case when tg_op = 'INSERT' then 'registered' when stack like '%unregister_worker%' then 'left' else 'dead' end,
        new.id, new.pid,
        extract(epoch from clock_timestamp() - new.seen_at), extract(epoch from new.dead_after)
    );
    return null;
end
$do$;
create trigger chaos_note_registered after insert on penstock.workers for each row execute function public.chaos_note_worker();
create trigger chaos_note_dead after update on penstock.workers for each row
when (new.state = 'dead' and old.state <> 'dead') execute function public.chaos_note_worker();
"""


@dataclass(frozen=True, slots=True)
class Noted:
    """A change of a job or a worker, on the clock of the events.

    `what` is claimed, begun, back (queued again), over (archived), registered, dead or left. `number` is the number of the
    attempt, `worker` the process that had the job, or whose row changed.
    """

    what: str
    at: float
    worker: str = ""
    id: str = ""
    name: str = ""
    number: int = 0
    seq: int = 0
    priority: int = 0
    crashes: int = 0
    silent_s: float = 0.0
    dead_after_s: float = 0.0


async def notes(database: Any, difference: float) -> list[Noted]:
    """All notes, in their order."""
    found = await database.fetch(
        "select notes.what, extract(epoch from notes.at)::float8 as at, notes.id, notes.name, notes.number, notes.seq,"
        " notes.priority, notes.crashes, notes.silent_s, notes.dead_after_s,"
        " coalesce(notes.pid::text, (regexp_match(leased.worker, '\\.(\\d+)\\.[0-9a-f]{6}'))[1], '') as worker"
        " from public.chaos_notes as notes"
        " left join public.chaos_notes as leased on leased.what = 'leased' and leased.lease = notes.lease"
        " where notes.what <> 'leased' order by notes.n"
    )
    return [
        Noted(
            row["what"], row["at"] + difference, row["worker"], str(row["id"] or ""), row["name"] or "", row["number"] or 0,
            row["seq"] or 0, row["priority"] or 0, row["crashes"] or 0, row["silent_s"] or 0.0, row["dead_after_s"] or 0.0,
        )
        for row in found
    ]  # fmt: skip


def take_away(runs: Iterable[Run], noted: Sequence[Noted]) -> None:
    """Mark the runs that ended for other workers because the database ended the leases of a dead worker."""
    deaths: dict[str, list[float]] = defaultdict(list)
    for note in noted:
        if note.what == "dead":
            deaths[note.worker].append(note.at)
    ended: dict[tuple[str, int, str], float] = {}
    for note in noted:
        # In the transaction of the death, or in a later one for a lease that was locked then.
        if note.what in ("back", "over") and any(at <= note.at for at in deaths[note.worker]):
            ended.setdefault((note.id, note.number, note.worker), note.at)
    for run in runs:
        at = ended.get((run.id, run.attempt, run.worker))
        dead = [death for death in deaths[run.worker] if run.begin - SLACK_S <= death]
        if run.lost_at is None and at is not None and dead and min(dead) <= at and run.begin <= at + SLACK_S < run.end:
            run.lost_at = max(at, run.begin)


def check_deaths(noted: Iterable[Noted], absences: Sequence[Gone]) -> Iterable[str]:
    """No worker counts as dead too early, or while it is alive and can send heartbeats.

    Args:
        noted: What the database did.
        absences: When processes were gone, suspended or not scheduled, or could not reach the database (worker "": all of them).
    """
    for note in noted:
        if note.what != "dead":
            continue
        if note.silent_s < note.dead_after_s:
            yield f"P4: {note.worker} was declared dead {note.silent_s:.3f} s after its last heartbeat, at {note.at:.3f}"
        elif not any(
            gone.worker in ("", note.worker) and gone.at < note.at and gone.back > note.at - note.silent_s for gone in absences
        ):
            yield f"P4: {note.worker} was declared dead at {note.at:.3f} while it ran and could reach the database"


def check_told(runs: Iterable[Run], noted: Iterable[Noted], absences: Sequence[Gone]) -> Iterable[str]:
    """A worker that has learned that it lost its jobs stops them."""
    registered: dict[str, list[float]] = defaultdict(list)
    for note in noted:
        if note.what == "registered":
            registered[note.worker].append(note.at)
    for run in runs:
        told = min((at for at in registered[run.worker] if run.lost_at is not None and at > run.lost_at), default=None)
        if told is None or run.end == float("inf"):
            continue
        away = sum(
            min(gone.back, run.end) - max(gone.at, told)
            for gone in absences
            if gone.worker in ("", run.worker) and gone.at < run.end and gone.back > told
        )
        if run.end - told - away > TOLD_S:
            yield (
                f"P4: {run.name} {run.id} ran on on {run.worker} for {run.end - told:.3f} s after that had learned of its loss"
            )


def check_begun(runs: Iterable[Run], noted: Iterable[Noted], absences: Sequence[Gone]) -> Iterable[str]:
    """A worker that was declared dead begins nothing until it has registered again, but for `THAW_S` after it has returned."""
    changes: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for note in noted:
        if note.what in ("dead", "registered"):
            changes[note.worker].append((note.at, note.what))
    for run in runs:
        before = [change for change in changes[run.worker] if change[0] <= run.begin + SLACK_S]
        at, what = max(before, default=(0.0, ""))
        if what != "dead":
            continue
        away = [(gone.at, gone.back) for gone in absences if gone.worker in ("", run.worker)]
        awake = run.begin - at - overlap(away, at, run.begin)
        if awake > THAW_S:
            yield f"P4: {run.name} {run.id} began on {run.worker} {awake:.3f} s after that was declared dead"


def healing(
    killed: Mapping[str, float], runs: Iterable[Run], noted: Iterable[Noted], away: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """For each job that ran on a worker when the worker was killed: seconds until the job was queued again or archived."""
    back: dict[tuple[str, int], float] = {}
    for note in noted:
        if note.what in ("back", "over"):
            back.setdefault((note.id, note.number), note.at)
    waited: dict[str, float] = {}
    for run in runs:
        death = killed.get(run.worker)
        if death is not None and run.end == float("inf"):
            until = back.get((run.id, run.attempt), float("inf"))
            waited[run.id] = max(waited.get(run.id, 0.0), until - death - overlap(away, death, until))
    return waited


def overlap(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """The part of the time from begin to end that the spans cover."""
    covered, reached = 0.0, begin
    for at, back in sorted(spans):
        covered += max(0.0, min(back, end) - max(at, reached))
        reached = max(reached, min(back, end))
    return covered


def check_lines(
    noted: Sequence[Noted], away: Sequence[tuple[float, float]], committed: Mapping[str, float] | None = None
) -> Iterable[str]:
    """Later jobs do not pass a job for long: neither one that is queued again, which keeps its place, nor one whose transaction
    has committed late, behind whose place others have been claimed already. A job that has to run alone runs alone.

    Args:
        noted: What the database did.
        away: When the database was away.
        committed: When the enqueue of a job was acknowledged, by id.
    """
    claims: dict[tuple[str, int], list[Noted]] = defaultdict(list)
    for note in noted:
        if note.what == "claimed":
            claims[note.name, note.priority].append(note)
    alone = _alone(noted)
    waiting: dict[str, Noted] = {}
    new = dict(committed or {})
    for note in noted:
        at = new.pop(note.id, None)
        if at is not None and note.what == "claimed":
            yield from _passed(replace(note, at=at), note, "was committed", claims, away)
        if note.what == "back" and (note.seq or note.crashes == 2):
            waiting[note.id] = note
        elif note.what in ("claimed", "over") and (since := waiting.pop(note.id, None)) is not None:
            if since.crashes == 2:
                others = [span for id, span in alone if id != since.id]
                waited = note.at - since.at - overlap([*others, *away], since.at, note.at)
                if waited > ALONE_S:
                    yield f"P9: {since.name} {since.id} waited for {waited:.1f} s to run alone, while no other one did"
                continue
            yield from _passed(since, note, "was back in its line", claims, away)


def _passed(
    since: Noted, note: Noted, what: str, claims: Mapping[tuple[str, int], Sequence[Noted]], away: Sequence[tuple[float, float]]
) -> Iterable[str]:
    """Whether a job behind this one was claimed while this one waited, from `since` until `note`."""
    if note.at - AT_ONCE_S < since.at + PASSED_OVER_S:
        return
    until = since.at + PASSED_OVER_S + overlap(away, since.at, note.at)
    for other in claims.get((since.name, since.priority), ()):
        if other.seq > since.seq and until < other.at < note.at - AT_ONCE_S:
            yield (
                f"P9: {since.name} {since.id} {what} at {since.at:.3f}, and {other.id} behind it"
                f" was claimed at {other.at:.3f}, before it was at {note.at:.3f}"
            )
            break


def _alone(noted: Iterable[Noted]) -> list[tuple[str, tuple[float, float]]]:
    """The jobs that ran alone, and when."""
    begun: dict[str, float] = {}
    found = []
    for note in noted:
        if note.what == "claimed" and note.crashes == 3:
            begun[note.id] = note.at
        elif note.what in ("back", "over") and note.id in begun:
            found.append((note.id, (begun.pop(note.id), note.at)))
    return found
