"""Database roles with one access, for tests of what a part of Penstock can do with it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from penstock.testing import TemporaryDatabases

REFUSED = "permission denied"


@contextmanager
def role_of(databases: TemporaryDatabases, url: str, access: str) -> Iterator[str]:
    """The database for a login role that has this access and nothing else; yields its URL.

    At the end it asserts that the server has refused nothing meanwhile, as far as its log can be read.
    """
    role = f"{access}_{secrets.token_hex(4)}"
    password = secrets.token_hex(8)
    _run(url, f"create role {role} login password '{password}'", f"select penstock.grant_access('{role}', '{access}')")
    log = None if databases.server is None else databases.server.data_dir / "postgres.log"
    begin = _size(log)
    try:
        parts = urlsplit(url)
        yield urlunsplit(parts._replace(netloc=f"{role}:{password}@{parts.netloc.rpartition('@')[2]}"))
    finally:
        refused = _lines_with(log, begin, REFUSED)
        _run(
            url,
            f"select pg_terminate_backend(pid) from pg_stat_activity where usename = '{role}'",
            f"drop owned by {role} cascade",
            f"drop role {role}",
        )
    assert refused == [], f"what access {access} may not do: {refused}"


def _run(url: str, *statements: str) -> None:
    async def run() -> None:
        sql: asyncpg.Connection[Any] = await asyncpg.connect(url)
        for statement in statements:
            await sql.execute(statement)
        await sql.close()

    # The test may be inside an event loop.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, run()).result()


def _size(log: Path | None) -> int:
    return log.stat().st_size if log is not None and log.exists() else 0


def _lines_with(log: Path | None, begin: int, words: str) -> list[str]:
    if log is None or not log.exists():
        return []
    return [line for line in log.read_bytes()[begin:].decode(errors="replace").splitlines() if words in line]
