"""Plans of statements that stand in functions, as PostgreSQL explains them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import asyncpg

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def explain(
    sql: Sql, function: str, first: str, last: str, variables: dict[str, str], *, caller: str | None = None
) -> dict[str, Any]:
    """The plan, with real row and page counts, of a statement that stands in a function, under the function's settings.

    The statement is the function's own source from `first` to `last`; its effect is rolled back. A function without settings
    of its own runs under those of its `caller`.
    """
    found = "select {} from pg_proc where proname = $1 and pronamespace = 'penstock'::regnamespace"
    source = await sql.fetchval(found.format("prosrc"), function)
    settings = await sql.fetchval(found.format("proconfig"), caller or function)
    statement = source[source.index(first) : source.index(last, source.index(first))]
    for name, value in sorted(variables.items(), key=lambda pair: -len(pair[0])):
        statement = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w(.])", value, statement)
    transaction = sql.transaction()
    await transaction.start()
    try:
        for setting in settings:
            name, _, value = setting.partition("=")
            await sql.execute("select set_config($1, $2, true)", name, value)
        (row,) = await sql.fetch(f"explain (analyze, buffers, timing off, format json) {statement}")
    finally:
        await transaction.rollback()
    plan: dict[str, Any] = json.loads(row[0])[0]["Plan"]
    return plan


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def seq_scans(plan: dict[str, Any]) -> list[str]:
    return [node["Relation Name"] for node in nodes(plan) if node["Node Type"] == "Seq Scan"]
