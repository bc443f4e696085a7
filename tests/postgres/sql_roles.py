"""Writes docs/sql-roles.md from the catalogue: which access may call which function. Run it with: make sqlroles."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg

from penstock import Penstock
from penstock.testing import TemporaryDatabases

PAGE = Path(__file__).parents[2] / "docs" / "sql-roles.md"
ACCESSES = ("reader", "producer", "worker", "server", "admin")
HEAD = """# Who may call what

Made from the catalogue of a database by `make sqlroles`; a test fails while it is not up to date. What the accesses are for:
[sql.md](sql.md#roles). A role without access may call nothing. The schema's owner may call everything; the functions without a
mark are parts of others and of migrations, for the owner alone.

"""


async def prepare(sql: asyncpg.Connection) -> None:
    """Make a role for each access, test_reader and so on."""
    for access in ACCESSES:
        await sql.execute(f"do $$ begin create role test_{access}; exception when duplicate_object then null; end $$")
        await sql.execute("select penstock.grant_access($1::name, $2)", f"test_{access}", access)


async def page(sql: asyncpg.Connection) -> str:
    """The page, by the rights that the catalogue has."""
    # So that types have the same names for every search path.
    await sql.execute("set search_path = pg_catalog")
    functions = await sql.fetch(
        """
        select
            format(
                '%s(%s)', proname, array_to_string(array(select format_type(type, null) from unnest(proargtypes) as type), ', ')
            ) as name,
            array(select has_function_privilege('test_' || access, oid, 'execute') from unnest($1::text[]) as access) as allowed,
            case prosecdef when true then 'owner' else 'caller' end as runs_as
        from pg_proc
        where pronamespace = 'penstock'::regnamespace
        order by 1
        """,
        ACCESSES,
    )
    tables = await sql.fetch(
        """
        select relname as name, array(
            select concat_ws(', ',
                case when has_table_privilege('test_' || access, oid, 'select') then 'select' end,
                case when has_any_column_privilege('test_' || access, oid, 'insert') then 'insert' end,
                case
                    when has_any_column_privilege('test_' || access, oid, 'update')
                        or has_table_privilege('test_' || access, oid, 'delete')
                        then 'change'
                end
            )
            from unnest($1::text[]) as access
        ) as allowed
        from pg_class
        where relnamespace = 'penstock'::regnamespace and relkind in ('r', 'p') and not relispartition
        order by 1
        """,
        ACCESSES,
    )
    head = "| {} | " + " | ".join(ACCESSES) + " |"
    rule = "|---" * (len(ACCESSES) + 1) + "|"
    lines = [head.format("table"), rule]
    lines += [f"| {row['name']} | {' | '.join(row['allowed'])} |" for row in tables]
    lines += ["", head.format("function") + " runs as |", rule + "---|"]
    lines += [
        f"| `{row['name']}` | {' | '.join('x' if yes else '' for yes in row['allowed'])} | {row['runs_as']} |"
        for row in functions
    ]
    return HEAD + "\n".join(lines) + "\n"


async def main(url: str) -> None:
    """Write the page."""
    async with Penstock(url):
        pass
    sql: Any = await asyncpg.connect(url)
    await prepare(sql)
    PAGE.write_text(await page(sql), "utf-8")
    await sql.close()


if __name__ == "__main__":
    with TemporaryDatabases(None) as databases, databases.database() as url:
        asyncio.run(main(url))
