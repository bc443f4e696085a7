"""The last step of an erasure: the tables from which it has deleted rows are vacuumed.

PostgreSQL keeps the bytes of deleted rows until a vacuum, and statistics of columns quote their values until an analyze. A
vacuum cannot be part of a function or a transaction, and is for the owner of the tables. It removes a row only when no snapshot
sees it any more, so an erasure waits for older transactions.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from penstock.operations import queries
from penstock.operations.models import OperationRecord
from penstock.postgres.database import Database

_STATISTICS_OF_ARCHIVE = (
    "select exists (select from pg_stats where schemaname = 'penstock' and tablename = 'archived_jobs' and inherited)"
)
# An analyze of an empty table leaves its statistics as they are.
_STATISTICS_OF_EMPTY = """
select stored.attrelid::regclass::text as relation, class.relname as name, quote_ident(stored.attname) as attribute,
    stored.attname as plain, format_type(stored.atttypid, stored.atttypmod) as type
from pg_stats as known
join pg_class as class on class.relname = known.tablename and class.relnamespace = 'penstock'::regnamespace
join pg_attribute as stored on stored.attrelid = class.oid and stored.attname = known.attname
where known.schemaname = 'penstock' and not known.inherited
    and stored.atttypid in ('text'::regtype, 'jsonb'::regtype, 'text[]'::regtype, 'json[]'::regtype)
    and 'penstock.' || quote_ident(class.relname) = any ($1)
order by 1, 3
"""
_CLEAR = {
    True: "select pg_clear_attribute_stats('penstock', '{name}', '{plain}', false)",
    # To give a column the type that it has changes no row, and drops its statistics.
    False: "set lock_timeout = '5s'; alter table {relation} alter column {attribute} type {type}",
}
_LOCK = "select from penstock.erasures where operation = $1 for update skip locked"


async def vacuum_erased(database: Database) -> OperationRecord | None:
    """Vacuum the tables of the oldest erasure that waits for it, and end the erasure.

    Returns:
        The operation at its end; None: no erasure waits, this role does not own the tables, another process does it, or an open
        transaction still sees what was deleted.
    """
    waiting = await queries.erasures(database, "vacuum")
    if not waiting or not await queries.may_vacuum(database):
        return None
    operation = waiting[0]
    rewrite = bool(operation.filter.get("rewrite"))
    command = f"vacuum ({'full' if rewrite else 'index_cleanup on'}, analyze) "
    if await queries.vacuum_waits(database, operation.id):
        return None
    locking = await database.connect()
    try:
        async with locking.transaction():
            # Held while this process works. It has no snapshot, so it does not hold the vacuum up.
            if not await locking.fetch(_LOCK, operation.id):
                return None
            await _vacuum(database, command, operation)
        # Only now: the transaction of the lock is older than the rows of statistics that the others have replaced. Who may not do
        # this gets a warning, and autovacuum does it in time.
        await locking.execute(f"vacuum ({'full' if rewrite else 'index_cleanup on'}) pg_catalog.pg_statistic")
    finally:
        await locking.close()
    return await queries.finish_erasure(database, operation.id)


async def _vacuum(database: Database, command: str, operation: OperationRecord) -> None:
    connection: Any = await database.connect()
    try:
        tables = await queries.tables_to_vacuum(database, operation.id)
        for table in tables:
            await connection.execute(command + table)
        if await connection.fetchval(_STATISTICS_OF_ARCHIVE):
            await connection.execute("analyze penstock.archived_jobs")
        for row in await connection.fetch(_STATISTICS_OF_EMPTY, tables):
            if not await connection.fetchval(f"select exists (select from {row['relation']})"):  # noqa: S608
                await connection.execute(_CLEAR[connection.get_server_version().major >= 18].format(**row))
    finally:
        await connection.close(timeout=timedelta(seconds=5).total_seconds())
