"""`penstock workers`: who works, and what blocks whose event loop."""

from __future__ import annotations

import json
from typing import Any

import asyncpg

from tests import command_line


def penstock(url: str, *arguments: str) -> str:
    done = command_line.penstock(url, *arguments, COLUMNS="240")
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_blocked_loop_is_shown_with_the_handler_that_blocks_it(url: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("select penstock.register_worker('well', '{mail}'), penstock.register_worker('stuck', '{mail}')")
    await sql.execute(
        "update penstock.workers set blocked_since = now() - interval '1 minute', blocked_by = 'mail job_1' where id = 'stuck'"
    )
    lines = {line.split()[0]: line for line in penstock(url, "workers").splitlines()[1:]}
    assert "mail job_1 since" in lines["stuck"]
    assert "since" not in lines["well"]
    blocked = {one["id"]: one["blocked_by"] for one in json.loads(penstock(url, "workers", "--json"))}
    assert blocked == {"well": None, "stuck": "mail job_1"}
