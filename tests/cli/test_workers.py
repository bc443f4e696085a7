"""`penstock workers`: who works, and what blocks whose event loop."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import asyncpg

from penstock import Event, Job, Leader, Penstock, Settings, __version__
from penstock.testing import running_worker
from penstock.worker.work import Work
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


async def test_everything_that_a_worker_works_on_is_shown(url: str, sql: asyncpg.Connection[Any]) -> None:
    app = Penstock(url, settings=Settings(code_version="8f3c2ad"))

    @app.job("mail")
    async def mail(job: Job[Any]) -> None: ...

    @app.pool("shipments").job
    async def ship(job: Job[Any]) -> None: ...

    @app.stream("orders").consumer(group="billing")
    async def bill(event: Event[Any]) -> None: ...

    @app.topic("delays").subscriber("JFK")
    async def at_jfk(job: Job[Any]) -> None: ...

    @app.timer(every=timedelta(hours=1), name="report")
    async def report(job: Job[Any]) -> None: ...

    @app.timer(every=timedelta(hours=1), name="tidy", as_job=False)
    async def tidy() -> None: ...

    @app.on_leader
    async def follow(leader: Leader) -> None: ...

    async with app, running_worker(app) as worker:
        (shown,) = json.loads(penstock(url, "workers", "--json"))
        assert {kind: sorted(shown[kind]) for kind in ("names", "pools", "topics", "consumers", "schedules", "leader_tasks")} == {
            "names": ["delays_JFK", "mail", "report"], "pools": ["shipments"], "topics": ["delays"],
            "consumers": ["orders/billing"], "schedules": ["report", "tidy"], "leader_tasks": ["follow"],
        }  # fmt: skip
        assert (shown["version"], shown["code_version"]) == (__version__, "8f3c2ad")
        # The process has the same id everywhere.
        assert shown["id"] == worker.id
        members = await sql.fetch("select id from penstock.members")
        assert all(row["id"].startswith(f"{worker.id}.") for row in members)
        table = penstock(url, "workers")
    for line in ("8f3c2ad", "types: ", "pools: shipments", "topics: delays", "consumers: orders/billing", "leader: follow"):
        assert line in table


async def test_what_a_worker_says_of_itself_is_never_in_the_way(url: str, sql: asyncpg.Connection[Any]) -> None:
    odd = json.dumps({
        "pools": "shipments", "consumers": [1, None, {"a": 1}], "schedules": {"report": 1}, "version": ["1"], "code_version": 7,
    })  # fmt: skip
    await sql.execute("select penstock.register_worker('odd', '{mail}', p_metadata => $1::text::jsonb)", odd)
    (shown,) = json.loads(penstock(url, "workers", "--json"))
    assert (shown["pools"], shown["consumers"], shown["schedules"]) == ([], ["1", '{"a": 1}'], [])
    assert (shown["version"], shown["code_version"]) == (None, None)


def test_of_very_many_names_as_many_are_told_as_the_database_takes() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    told = Work(pools=[Named(f"pool-{number}" + "x" * 200) for number in range(10_000)]).told  # type: ignore[misc]
    assert 200 < len(told["pools"]) < 10_000
    assert len(json.dumps(told)) < 65_536
