"""`penstock doctor`: looks at everything on which a working system depends, and says what to do about what it finds.

Each check answers with findings. A finding is `ok`, a `warning` (something will go wrong, or is slower than it could be) or a
`problem` (work stands still, or will). Checks are independent: one that fails becomes a finding itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC

from penstock._version import __version__
from penstock.core.logs import describe
from penstock.errors import PenstockError, SchemaMismatch
from penstock.history import lake_queries
from penstock.operations import queries as operation_queries
from penstock.operations.models import FAILING_BATCH
from penstock.postgres import health, migrate, suitability
from penstock.postgres.database import Database
from penstock.postgres.translation import DRIVER_ERRORS
from penstock.streams import group_queries
from penstock.streams.group_models import Lag, held_back
from penstock.worker import work_checks
from penstock.worker.findings import MOST_NAMED, Finding, named

OLD_SNAPSHOT_S = 300.0
_MOST_SLOT_BYTES = 1 << 30
# Autovacuum begins at 20,000 dead rows of queued_jobs and 1,000 of leases: at ten times as many, something holds it off.
MOST_DEAD_ROWS = {"queued_jobs": 200_000, "leases": 10_000, "workers": 10_000, "slots": 100_000, "group_offsets": 100_000}
NOTIFY_S = 5.0
_MOST_SKEW_S = 1.0
LAKE_BEHIND_S = 86_400.0
LAG_LONG_S = 60.0
_MOST_OPERATIONS = 1_000


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
        except (PenstockError, *DRIVER_ERRORS) as error:
            findings = [
                Finding(check, "warning", f"this could not be checked: {describe(error)}", "Check the rights of the role.")
            ]
        found += findings
    return found


async def _versions(database: Database) -> list[Finding]:
    server = await database.fetchval("select current_setting('server_version')")
    return [Finding("schema", "ok", f"the schema fits Penstock {__version__}, on PostgreSQL {server}")]


async def _settings(database: Database) -> list[Finding]:
    """What role, database and server set for connections that are not Penstock's own."""
    hindering, overridden = await suitability.hindrances(database)
    lacking = await suitability.lacking_connections(database)
    if found := [*hindering, *([lacking] if lacking else [])]:
        return [Finding("settings", "warning", one.message, one.advice) for one in found]
    other = f"; Penstock's own connections have another {named(overridden)}" if overridden else ""
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
                f"the archive has no partition for {named(missing)}",
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
            f"{message}: partitions are paused: {named(paused)}",
            f"When the reason is gone: penstock streams resume {_of(group)}",
        )
    if unowned := [lag.partition for lag in late if lag.owner is None]:
        return Finding(
            "streams",
            "warning",
            f"{message}: no worker consumes the partitions {named(unowned)}",
            "Start a worker whose application declares the consumer; when the group is no longer needed, drop it.",
        )
    return Finding("streams", "warning", message, f"See {see}. Start more workers, up to the number of partitions.")


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
    return found[:MOST_NAMED] or [Finding("operations", "ok", "no operation fails")]


_CHECKS: dict[str, Callable[[Database], Awaitable[list[Finding]]]] = {
    "schema": _versions,
    "settings": _settings,
    "restore": _restored,
    "workers": work_checks.workers,
    "transactions": _snapshots,
    "vacuum": _dead_rows,
    "notifications": _notifications,
    "clock": _clock,
    "archive": _archive,
    "streams": _streams,
    "schedules": work_checks.schedules,
    "workflows": work_checks.workflows,
    "keys": work_checks.keys,
    "operations": _operations,
    "lakes": _lakes,
}
