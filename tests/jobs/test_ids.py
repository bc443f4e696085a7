"""One process has one id, with which those of all its members begin."""

from __future__ import annotations

from typing import Any

import asyncpg

from penstock import Event, Job, Penstock
from penstock.testing import running_worker
from tests.command_line import penstock
from tests.waiting import eventually


async def test_all_ids_of_a_process_begin_alike(url: str, sql: asyncpg.Connection[Any]) -> None:
    app = Penstock(url)
    orders = app.stream("orders", int, partitions=1)
    pools = [app.pool(name) for name in ("one", "two")]

    @app.job("mail")
    async def mail(job: Job[Any]) -> None: ...

    @orders.consumer(group="billing")
    async def bill(event: Event[int]) -> None: ...

    async def work(job: Job[Any]) -> None: ...

    for pool in pools:
        pool.job(work)

    async def members() -> dict[str, str] | None:
        found = {row["group_name"]: row["id"] for row in await sql.fetch("select group_name, id from penstock.members")}
        return found if len(found) == 3 else None

    async with app, running_worker(app) as worker:
        found = await eventually(members, "all members")
        assert found == {"one": f"{worker.id}.p1", "two": f"{worker.id}.p2", "orders/billing": f"{worker.id}.c1"}
        assert await sql.fetchval("select id from penstock.workers") == worker.id


def test_types_are_listed_by_both_commands() -> None:
    for arguments in (["types", "--help"], ["types", "list", "--help"]):
        done = penstock("", *arguments)
        assert done.returncode == 0, done.stderr
        assert "list" in done.stdout and "--json" in done.stdout
