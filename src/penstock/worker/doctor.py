"""`penstock doctor`: looks at everything on which a working system depends, and says what to do about what it finds.

Each check answers with findings. A finding is `ok`, a `warning` (something will go wrong, or is slower than it could be) or a
`problem` (work stands still, or will). Checks are independent: one that fails becomes a finding itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, timedelta
from typing import Any, ClassVar, Literal

import asyncpg
from pydantic import ConfigDict

from penstock._version import __version__
from penstock.core.logs import describe
from penstock.core.records import example
from penstock.errors import PenstockError, SchemaMismatch
from penstock.history import lake_queries
from penstock.jobs import type_queries, worker_queries
from penstock.jobs.records import JobTypeRecord
from penstock.jobs.top import MOST, TopRecord, top
from penstock.operations import queries as operation_queries
from penstock.operations.models import FAILING_BATCH
from penstock.pools import views as pool_views
from penstock.postgres import health, migrate, suitability
from penstock.postgres.database import Database
from penstock.schedules import queries as schedule_queries
from penstock.streams import group_queries
from penstock.streams.group_models import Lag, held_back
from penstock.worker import fleets, problems
from penstock.workflows import queries as workflow_queries

Level = Literal["ok", "warning", "problem"]
OLD_SNAPSHOT_S = 300.0
_MOST_SLOT_BYTES = 1 << 30
# Autovacuum begins at 20,000 dead rows of queued_jobs and 1,000 of leases: at ten times as many, something holds it off.
MOST_DEAD_ROWS = {"queued_jobs": 200_000, "leases": 10_000, "workers": 10_000, "slots": 100_000, "group_offsets": 100_000}
NOTIFY_S = 5.0
_MOST_SKEW_S = 1.0
LAKE_BEHIND_S = 86_400.0
OLD_TICK_S = 60.0
_ENDLESS = timedelta(days=1)
_WAITS_LONG_S = 60.0
LAG_LONG_S = 60.0
_MOST_NAMED = 10
_MOST_OPERATIONS = 1_000


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        check: Name of the check.
        level: ok, warning or problem.
        message: What is so.
        advice: What to do about it; None: nothing.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "check": "workers", "level": "problem", "message": "3 jobs of invoice-shipments wait, and no worker works on this type",
        "advice": "Start one: penstock worker MODULE:APP. If one runs: does its application declare a handler for this type?",
    })  # fmt: skip

    check: str
    level: Level
    message: str
    advice: str | None = None


async def examine(database: Database) -> list[Finding]:
    """Run all checks, one after the other. When the database does not answer or its schema does not fit, only that is found."""
    try:
        await migrate.check(database)
    except SchemaMismatch as error:
        return [Finding("schema", "problem", error.message, error.hint or "Run: penstock migrate")]
    except PenstockError as error:
        return [Finding("database", "problem", error.message, error.hint or "Check PENSTOCK_DATABASE_URL and the server.")]
    found: list[Finding] = []
    for check, look in _CHECKS.items():
        try:
            findings = await look(database)
        except (PenstockError, asyncpg.PostgresError, OSError) as error:
            findings = [
                Finding(check, "warning", f"this could not be checked: {describe(error)}", "Check the rights of the role.")
            ]
        found += findings
    return found


def worst(findings: Sequence[Finding]) -> Level:
    """The highest level of the findings."""
    levels = {finding.level for finding in findings}
    return "problem" if "problem" in levels else "warning" if "warning" in levels else "ok"


async def _versions(database: Database) -> list[Finding]:
    server = await database.fetchval("select current_setting('server_version')")
    return [Finding("schema", "ok", f"the schema fits Penstock {__version__}, on PostgreSQL {server}")]


async def _settings(database: Database) -> list[Finding]:
    """What role, database and server set for connections that are not Penstock's own."""
    hindering, overridden = await suitability.hindrances(database)
    lacking = await suitability.lacking_connections(database)
    if found := [*hindering, *([lacking] if lacking else [])]:
        return [Finding("settings", "warning", one.message, one.advice) for one in found]
    other = f"; Penstock's own connections have another {_named(overridden)}" if overridden else ""
    return [Finding("settings", "ok", f"the settings of PostgreSQL hinder no connection{other}")]


async def _restored(database: Database) -> list[Finding]:
    if await database.fetchval("select penstock.is_unfenced()"):
        return [
            Finding(
                "restore",
                "problem",
                "the database is on another server, or another timeline, than was noted: it was restored, moved or promoted",
                "Stop workers and producers, and follow docs/restore.md: penstock restore check, penstock restore fence. "
                "When nothing was lost: penstock restore fence --nothing-lost",
            )
        ]
    return [Finding("restore", "ok", "the server is the one that was noted")]


async def _workers(database: Database) -> list[Finding]:
    found: list[Finding] = []
    loads = await pool_views.load_of_types(database, timedelta(minutes=1))
    found += _first([
        Finding(
            "workers",
            "problem",
            f"{load.ready} jobs of {load.name} wait, and no worker works on this type",
            "Start one: penstock worker MODULE:APP. If one runs: does its application declare a handler for this type?",
        )
        for load in sorted(loads, key=lambda load: -load.ready)
        if load.ready and not load.workers
    ])  # fmt: skip
    found += _first([
        Finding(
            "workers",
            "warning",
            f"the oldest job of {load.name} has waited {load.oldest_ready_s:.0f} s for a worker",
            "See penstock scale advise, and penstock jobs list for what holds the others up.",
        )
        for load in sorted(loads, key=lambda load: -(load.oldest_ready_s or 0.0))
        if load.workers and (load.oldest_ready_s or 0.0) > _WAITS_LONG_S
    ])  # fmt: skip
    paused = [record for record in await type_queries.job_types(database) if problems.is_paused(record)]
    waiting = {one.name: one.ready for one in await _waiting(database, paused)}
    found += _first([
        Finding(
            "workers",
            "warning",
            f"{problems.paused_since(record)}, and {waiting[record.name]} jobs wait",
            problems.end_of_pause(record),
        )
        for record in paused
        if waiting.get(record.name)
    ])  # fmt: skip
    found += await _quarantined(database)
    idle = sorted(load.name for load in loads if not load.workers and not load.ready and not waiting.get(load.name))
    if idle:
        found.append(
            Finding("workers", "warning", f"no worker works on {_named(idle)}", "Nothing waits. Start one before something does.")
        )
    for worker in await fleets.workers(database):
        if not worker.alive:
            continue
        if worker.blocked_since is not None:
            found.append(
                Finding(
                    "workers",
                    "problem",
                    f"the event loop of {worker.id} makes no progress: {worker.blocked_by or 'something'} blocks it",
                    'Declare the handler without async, or with executor="process"; restart the worker if it does not end.',
                )
            )
        found += [
            Finding(
                "workers",
                "problem",
                f"the consumer {consumer} has ended in {worker.id}: it halted",
                "Correct the cause, which penstock workers --json shows, and restart the worker.",
            )
            for consumer in worker.halted
        ]
    return found or [Finding("workers", "ok", f"workers work on all {len(loads)} job types")]


async def _quarantined(database: Database) -> list[Finding]:
    rows = await database.fetch(
        "select name, count(*) as jobs, (array_agg(id order by finished_at desc))[1] as latest"
        " from (select name, id, finished_at from penstock.archived_jobs"
        " where status <> 'succeeded' and finished_at > penstock.clock() - interval '1 day' and reason = 'quarantined'"
        " order by finished_at desc limit 1000) as quarantined group by name order by jobs desc, name"
    )
    return _first([
        Finding(
            "workers",
            "warning",
            f"{row['jobs']} jobs of {row['name']} were quarantined within a day: they cannot be read, or ended workers that ran "
            "nothing else",
            f"See why: penstock jobs show {row['latest']}. When the cause is gone, run them again: penstock jobs replay ID.",
        )
        for row in rows
    ])  # fmt: skip


async def _waiting(database: Database, paused: Sequence[JobTypeRecord]) -> list[TopRecord]:
    if not paused:
        return []
    return await top(database, "types", names=[record.name for record in paused[:MOST]], limit=MOST)


async def _snapshots(database: Database) -> list[Finding]:
    amounts = {one.gauge: one.amount for one in await health.gauges(database)}
    found = []
    if (age := amounts["oldest_snapshot_seconds"]) > OLD_SNAPSHOT_S:
        found.append(
            Finding(
                "transactions",
                "warning",
                f"a transaction has been open for {age:.0f} s, so that vacuum removes no rows",
                "Find it: select pid, usename, state, xact_start, query from pg_stat_activity order by xact_start; end it with "
                "pg_terminate_backend(pid), and set idle_in_transaction_session_timeout for its role.",
            )
        )
    if (retained := amounts["replication_slot_bytes"]) > _MOST_SLOT_BYTES:
        found.append(
            Finding(
                "transactions",
                "warning",
                f"a replication slot retains {retained / 2**30:.1f} GiB of write-ahead log",
                "Find it: select slot_name, active, restart_lsn from pg_replication_slots; start its reader, or drop it with "
                "pg_drop_replication_slot, and set max_slot_wal_keep_size.",
            )
        )
    return found or [Finding("transactions", "ok", f"the oldest transaction is {age:.0f} s old")]


async def _dead_rows(database: Database) -> list[Finding]:
    gauges = await health.gauges(database)
    vacuumed = {one.label: one.amount for one in gauges if one.gauge == "vacuumed_seconds"}
    found = [
        Finding(
            "vacuum",
            "warning",
            f"penstock.{one.label} has {one.amount:.0f} dead rows; "
            + (f"it was vacuumed {vacuumed[one.label]:.0f} s ago" if one.label in vacuumed else "it was never vacuumed"),
            f"Look for an old transaction or replication slot, see above; then: vacuum penstock.{one.label};",
        )
        for one in gauges
        if one.gauge == "dead_rows" and one.amount > MOST_DEAD_ROWS.get(one.label, 1_000_000)
    ]
    return found or [Finding("vacuum", "ok", "the hot tables have few dead rows")]


async def _notifications(database: Database) -> list[Finding]:
    """A notification through the pool has to arrive where workers listen."""
    if not await health.notifications_arrive(database, NOTIFY_S):
        return [
            Finding(
                "notifications",
                "problem",
                f"a notification did not arrive within {NOTIFY_S:.0f} s: a pooler swallows LISTEN",
                "Set PENSTOCK_LISTEN_URL to a direct connection to PostgreSQL (docs/pgbouncer.md). "
                "Until then workers poll once a second.",
            )
        ]
    return [Finding("notifications", "ok", "notifications arrive")]


async def _clock(database: Database) -> list[Finding]:
    ahead_s = await health.clock_ahead_s(database)
    if abs(ahead_s) > _MOST_SKEW_S:
        return [
            Finding(
                "clock",
                "warning",
                f"the database's clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's",
                "Penstock uses the database's clock alone; times that applications give, such as run_after, "
                "are off. Check NTP on both.",
            )
        ]
    return [Finding("clock", "ok", "the clocks of this machine and the database agree")]


async def _archive(database: Database) -> list[Finding]:
    missing = [one.label for one in await health.gauges(database) if one.gauge == "archive_day_missing" and one.amount]
    if missing:
        return [
            Finding(
                "archive",
                "warning",
                f"the archive has no partition for {_named(missing)}",
                "Workers make it ahead of time: start one. If one runs, its log says why maintenance fails.",
            )
        ]
    return [Finding("archive", "ok", "the archive has partitions for today and tomorrow")]


async def _streams(database: Database) -> list[Finding]:
    found: list[Finding] = []
    for group in await health.stream_lags(database):
        if group.quarantined:
            found.append(
                Finding(
                    "streams",
                    "problem",
                    f"{group.quarantined} partitions of {group.stream} are quarantined for {group.group}",
                    f"See why: penstock streams lag {_of(group)}. Then penstock streams resume {_of(group)}, "
                    "or move the group past the event with penstock streams reset.",
                )
            )
        lags = await group_queries.lag(database, group.stream, group.group)
        if group.lag_s > LAG_LONG_S and not group.quarantined:
            found.append(_behind(group, lags))
        for held in held_back(lags):
            found.append(
                Finding(
                    "streams",
                    "problem",
                    f"partition {held.partition} of {group.stream} is paused for {group.group}, and holds back "
                    f"{len(held.holds)} new partitions",
                    f"Resume it: penstock streams resume {_of(group)}, or move the group past its events.",
                )
            )
    return found or [Finding("streams", "ok", "no partition is quarantined, no group is behind, and no growth is held back")]


def _of(group: health.GroupLag) -> str:
    """The stream and the group, as a shell takes them."""
    return f"{shlex.quote(group.stream)} {shlex.quote(group.group)}"


def _behind(group: health.GroupLag, lags: Sequence[Lag]) -> Finding:
    """A group that is behind, and why: a handler fails, partitions are paused, or no worker consumes them."""
    message = f"{group.group} is {group.lag} events behind in {group.stream}; the oldest waits {group.lag_s:.0f} s"
    see = f"penstock streams lag {_of(group)}"
    late = [lag for lag in lags if lag.lag]
    if failing := [(lag.failing_since, lag.partition, lag.failing_offset) for lag in late if lag.failing_since is not None]:
        since, partition, offset = min(failing)
        return Finding(
            "streams",
            "warning",
            f"{message}: a handler fails at offset {offset} of partition {partition} since "
            f"{since.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
            f"See the error: {see}. Correct the handler, or move the group past the event with penstock streams reset.",
        )
    if paused := [lag.partition for lag in late if lag.paused_at is not None]:
        return Finding(
            "streams",
            "warning",
            f"{message}: partitions are paused: {_named(paused)}",
            f"When the reason is gone: penstock streams resume {_of(group)}",
        )
    if unowned := [lag.partition for lag in late if lag.owner is None]:
        return Finding(
            "streams",
            "warning",
            f"{message}: no worker consumes the partitions {_named(unowned)}",
            "Start a worker whose application declares the consumer; when the group is no longer needed, drop it.",
        )
    return Finding("streams", "warning", message, f"See {see}. Start more workers, up to the number of partitions.")


async def _workflows(database: Database) -> list[Finding]:
    found: list[Finding] = []
    amounts = {one.gauge: one.amount for one in await health.gauges(database)}
    if (age := amounts["workflow_tick_seconds"]) > OLD_TICK_S:
        found.append(
            Finding(
                "workflows",
                "problem",
                f"what waits for jobs that have ended was not released for {age:.0f} s",
                "Start a worker or a server, whose maintenance does it. If one runs, its log says why maintenance fails, or a "
                "transaction that stays open has locked a job group or a waiting job: see the transactions.",
            )
        )
    found += [
        Finding(
            "workflows",
            "problem",
            f"job {stuck.job} of {stuck.name} waits for {stuck.after}, which has ended or is gone",
            f"Cancel it, and enqueue it again: penstock jobs cancel {stuck.job}. Please report it, since this does not happen.",
        )
        for stuck in await workflow_queries.stuck_dependencies(database)
    ]
    endless = await workflow_queries.endless_waits(database, _ENDLESS)
    if signals := [f"{wait.id} of {wait.name} for {wait.waits_for}" for wait in endless if wait.kind == "signal"]:
        found.append(
            Finding(
                "workflows",
                "warning",
                f"jobs have waited for more than a day for a signal, without a timeout: {_named(signals)}",
                "Send it, penstock jobs signal ID NAME VALUE, or end the job: penstock jobs cancel ID. Give the wait a timeout "
                "where the signal may not come: job.wait_for(..., timeout=...).",
            )
        )
    if unsealed := [wait.name for wait in endless if wait.kind == "group"]:
        found.append(
            Finding(
                "workflows",
                "warning",
                f"job groups that are not sealed have not changed for a day: {_named(unsealed)}",
                "Open each again with async with, which seals it, or end it: penstock workflows cancel NAME. "
                "One whose children have ended is cancelled after a week, or after keep, by penstock.prune, which workers call; "
                "without workers it stays open.",
            )
        )
    return found or [Finding("workflows", "ok", "what waits for other jobs is released when they end")]


async def _keys(database: Database) -> list[Finding]:
    """What waits for a key of encryption that a worker of it lacks."""
    found: list[Finding] = []
    for work in await worker_queries.locked_work(database):
        lacks = f"lack the key {work.key_id} of {work.name}" if work.key_id else f"have no key, and {work.name} is encrypted"
        if work.holders:
            message = f"workers {lacks}: {_named(work.lacking)}; what is encrypted goes to {_named(work.holders)} alone"
        else:
            message = f"workers {lacks}, and no other worker of it has it: {_named(work.lacking)}; what is encrypted waits"
        found.append(
            Finding(
                "keys",
                "warning" if work.holders else "problem",
                message,
                "Give them the keys that the producers have: Penstock(keys=[...]), or PENSTOCK_KEYS; penstock keys list shows "
                "the ids of keys.",
            )
        )
    return _first(found) or [Finding("keys", "ok", "no work waits for a key of encryption that a worker lacks")]


async def _schedules(database: Database) -> list[Finding]:
    """Schedules that two applications declare with other times, and time zones whose rules differ between machines."""
    found = []
    for subject, stored, said, workers in await schedule_queries.differences(database):
        if stored is None:
            found.append(
                Finding(
                    "schedules",
                    "warning",
                    f"the rules of the time zone {subject} differ between machines: {_named(workers)} have {said}",
                    "Update tzdata on all of them, as a package of the system and of Python, and restart the workers.",
                )
            )
        else:
            found.append(
                Finding(
                    "schedules",
                    "warning",
                    f"schedule {subject} runs by {stored}, and {_named(workers)} declare it as {said} and do not run it",
                    "Restart them with the code that the others have, or give one of the two schedules another name.",
                )
            )
    return found[:_MOST_NAMED] or [Finding("schedules", "ok", "all workers have the same schedules and time zones")]


async def _lakes(database: Database) -> list[Finding]:
    behind_s = await health.lake_lags(database)
    lakes = await lake_queries.lakes(database)
    found = [
        Finding(
            "lakes",
            "warning",
            f"finished jobs have waited {behind:.0f} s for the lake {lake.name}"
            + (", and keeps the archive from being pruned" if lake.guards else ""),
            f"Run penstock history run; or, when it is no longer needed: select penstock.drop_lake('{lake.name}');",
        )
        for lake in lakes
        if (behind := behind_s.get(lake.name, 0.0)) > LAKE_BEHIND_S
    ]
    return found or [Finding("lakes", "ok", "all lakes are up to date" if lakes else "there is no lake")]


async def _operations(database: Database) -> list[Finding]:
    found = [
        Finding(
            "operations",
            "problem",
            f"operation {one.id} ({one.kind}) does not go on: {one.error}",
            f"It is tried again. Remove what it says, or end it: penstock operations cancel {one.id}",
        )
        # The latest come first, and those that fail have often run for long.
        for one in await operation_queries.operations(database, _MOST_OPERATIONS, running=True)
        if one.error is not None and one.error.startswith(FAILING_BATCH)
    ]
    return found[:_MOST_NAMED] or [Finding("operations", "ok", "no operation fails")]


_CHECKS: dict[str, Callable[[Database], Awaitable[list[Finding]]]] = {
    "schema": _versions,
    "settings": _settings,
    "restore": _restored,
    "workers": _workers,
    "transactions": _snapshots,
    "vacuum": _dead_rows,
    "notifications": _notifications,
    "clock": _clock,
    "archive": _archive,
    "streams": _streams,
    "schedules": _schedules,
    "workflows": _workflows,
    "keys": _keys,
    "operations": _operations,
    "lakes": _lakes,
}


def _first(findings: list[Finding]) -> list[Finding]:
    """The first ten findings of one kind about job types, and how many more there are: thousands would hide all others."""
    rest = len(findings) - _MOST_NAMED
    if rest <= 0:
        return findings
    more = f"the same holds for {rest} more job types"
    return [*findings[:_MOST_NAMED], replace(findings[-1], message=more, advice="See penstock stats and penstock types list.")]


def _named(names: Sequence[Any]) -> str:
    shown = ", ".join(str(name) for name in names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"
