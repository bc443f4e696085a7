"""History that has come back from lakes into the database: rows of any age, and how many there are."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg

Sql: TypeAlias = "asyncpg.Connection[Any]"
TABLES = ("rollups", "worker_use", "run_history", "failure_signatures")


async def fill(sql: Sql, *ages: int) -> None:
    """Rows of these ages in days in each table, of two lakes."""
    for lake in ("main", "other"):
        await sql.execute("select penstock.open_lake($1, 'file:///' || $1)", lake)
        for age in ages:
            await sql.execute(
                "select penstock.commit_lake_batch($1, $2, '', 1, '[]', $3, $4, $5, null, $6)",
                lake,
                1 + await sql.fetchval("select batch from penstock.lakes where name = $1", lake),
                *[await sql.fetchval(query, str(age)) for query in ROWS],
            )


ROWS = (
    """
    select json_build_array(json_build_object(
        'name', 'bill', 'minute', date_trunc('minute', now() - make_interval(days => $1::text::integer)), 'succeeded', 1,
        'failed', 0, 'expired', 0, 'cancelled', 0, 'retries', 0, 'delay_s', 0, 'run_s', 0, 'hot_keys', '{}'::jsonb
    ))::text
    """,
    """
    select json_build_array(json_build_object(
        'worker', 'w', 'minute', date_trunc('minute', now() - make_interval(days => $1::text::integer)), 'jobs', 1, 'busy_s', 1
    ))::text
    """,
    """
    select json_build_array(json_build_object(
        'signature', 's', 'name', 'bill', 'day', (now() at time zone 'UTC')::date - $1::text::integer, 'kind', 'E',
        'message', 'x', 'sample', 'x', 'sample_id', penstock.new_id(), 'failures', 1, 'first_at', now(), 'last_at', now()
    ))::text
    """,
    """
    select json_build_array(json_build_object(
        'id', penstock.new_id(), 'name', 'run-' || $1::text, 'workflow', 'nightly', 'status', 'succeeded', 'started_at', now(),
        'finished_at', now() - make_interval(days => $1::text::integer), 'duration_s', 1, 'steps', 1, 'shared', 0, 'succeeded', 1,
        'failed', 0, 'cancelled', 0, 'expired', 0
    ))::text
    """,
)


async def counts(sql: Sql) -> dict[str, int]:
    """How many rows each table has."""
    return {table: await sql.fetchval(f"select count(*) from penstock.{table}") for table in TABLES}
