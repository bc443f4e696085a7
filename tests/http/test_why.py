"""Why a job waits is one answer: for each reason SQL, Python, HTTP, its client and both ways of the command line say the same."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest
from pydantic import TypeAdapter

from penstock import Penstock, Why
from penstock.client import AsyncClient
from penstock.core.encryption import Keyring, new_key
from tests.http.http_server import TOKEN, Served, serving

Sql: TypeAlias = "asyncpg.Connection[Any]"
COMMANDS = """
import sys
from penstock.cli import app
for id in sys.argv[1].split(","):
    app(["jobs", "show", id, "--json"], standalone_mode=False)
    print("end")
"""


@pytest.fixture
def server(url: str) -> Iterator[Served]:
    """A server on the database of the test, whose maintenance leaves the expired job where it is."""
    with serving(url, PENSTOCK_MAINTENANCE_INTERVAL="300") as served:
        yield served


async def types(sql: Sql) -> dict[str, UUID]:
    """Jobs of plain types, each with the reason for which it waits."""
    options = {
        "mail": {},
        "paused": {},
        "few": {"concurrency": 1},
        "slow": {"rate_limit": 1, "rate_period": "1 hour"},
        "sealed": {"encrypted": True},
        "nobody": {},
    }
    for name, given in options.items():
        await sql.execute("select penstock.create_job_type($1, $2::text::jsonb)", name, json.dumps(given))
    working = [name for name in options if name != "nobody"]
    await sql.execute("select penstock.register_worker('idle', $1, p_dead_after => '1 hour')", working)

    async def enqueue(name: str, more: str = "") -> UUID:
        id: UUID = await sql.fetchval(f"select penstock.enqueue($1{more})", name)
        return id

    async def ended(outcome: str) -> UUID:
        id = await enqueue("mail")
        await sql.execute(
            "select penstock.settle("
            "    array[id], array[attempt], array[lease], array[$1], array['{}'::jsonb], array[interval '1 hour']"
            ") from penstock.claim('w', '{mail}', 1)",
            outcome,
        )
        return id

    found = {"retry": await ended("failed"), "snoozed": await ended("snoozed"), "finished": await ended("succeeded")}
    for reason, kind in {"sleep": "sleep", "signal": "wait", "children": "gather"}.items():
        found[reason] = await enqueue("mail", ", p_run_after => now() + interval '1 hour'")
        await sql.execute(
            "insert into penstock.job_steps (job, name, kind, at) values ($1, 'a step', $2, penstock.clock())",
            found[reason],
            kind,
        )
        await sql.execute("update penstock.queued_jobs set waits_for = 'a step' where id = $1", found[reason])
    found["running"] = await enqueue("mail")
    await sql.execute("select penstock.claim('w', '{mail}', 1)")
    found["deferred"] = await enqueue("mail", ", p_run_after => now() + interval '1 hour'")
    found["ready"], found["behind"] = await enqueue("mail"), await enqueue("mail")
    found["expired"], found["alone"] = await enqueue("mail"), await enqueue("mail")
    await sql.execute(
        "update penstock.queued_jobs set crashes = 2, seq = null, run_after = penstock.isolation_time() where id = $1",
        found["alone"],
    )
    found["paused"] = await enqueue("paused")
    await sql.execute("select penstock.pause('paused')")
    for name, reason in (("few", "concurrency"), ("slow", "rate")):
        await enqueue(name)
        await sql.execute("select penstock.claim('w', array[$1], 1)", name)
        found[reason] = await enqueue(name)
    keyring = Keyring([new_key()])
    found["no-key"] = await sql.fetchval("select penstock.enqueue('sealed', $1)", keyring.seal("{}", b"sealed"))
    found["no-worker"] = await enqueue("nobody")
    found["dependencies"] = await enqueue("mail", f", p_after => array['{found['deferred']}'::uuid]")
    return found


async def pools(sql: Sql) -> dict[str, UUID]:
    """Jobs of pools, each with the reason for which it waits."""
    await sql.execute(
        """
        select
            penstock.declare_pool('keys', '{"slots": 1}'),
            penstock.declare_pool('rated', '{"slots": 1, "key_rate_limit": 1, "key_rate_period": "1 hour"}'),
            penstock.declare_pool('placed', '{"assignor": "custom"}');
        """
    )

    async def enqueue(pool: str, key: str, more: str = "") -> UUID:
        id: UUID = await sql.fetchval(f"select penstock.enqueue($1, p_key => $2{more})", pool, key)
        return id

    for pool in ("keys", "rated", "placed"):
        await sql.execute("select penstock.join_group($1, 'm', gen_random_uuid(), '1 hour')", pool)
    found = {f"{key}-key": await enqueue("placed", key) for key in ("quarantined", "paused")}
    found["unplaced"], found["moving"] = await enqueue("placed", "unplaced"), await enqueue("placed", "moving")
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")
    await sql.execute("update penstock.slots set error = 'KeyError: no', failed_at = now() where key = 'quarantined'")
    await sql.execute("update penstock.slots set owner = null, target = null where key = 'unplaced'")
    await sql.execute("update penstock.slots set target = 'other' where key = 'moving'")
    await sql.execute("select penstock.pause_key('placed', 'paused')")

    first = {key: await enqueue("keys", key) for key in ("retry", "snoozed", "crashed", "busy", "suspended")}
    found["key-retry"], found["key-snoozed"] = await enqueue("keys", "retry"), await enqueue("keys", "snoozed")
    found["key-alone"], found["key-busy"] = await enqueue("keys", "crashed"), await enqueue("keys", "busy")
    found["key-suspended"] = await enqueue("keys", "suspended")
    await sql.execute(
        "update penstock.queued_jobs set run_after = now() + interval '1 hour', attempt = 2, errors = '[{}]' where id = $1",
        first["retry"],
    )
    await sql.execute(
        "update penstock.queued_jobs set run_after = now() + interval '1 hour', snoozed_at = now() where id = $1",
        first["snoozed"],
    )
    await sql.execute(
        "update penstock.queued_jobs set crashes = 2, run_after = penstock.isolation_time() where id = $1", first["crashed"]
    )
    await sql.execute(
        "insert into penstock.job_steps (job, name, kind, at) values ($1, 'approved', 'wait', penstock.clock())",
        first["suspended"],
    )
    await sql.execute(
        "update penstock.queued_jobs set run_after = '9998-01-01', waits_for = 'approved' where id = $1", first["suspended"]
    )
    # Ahead of its turn: the job behind the one that runs is in progress, and waits.
    claim = "select * from penstock.claim_keys('m', $1, '{0}', '{1}', 10, 2)"
    claimed = await sql.fetch(claim, "keys")
    assert {row["id"] for row in claimed[:-1]} == {first["busy"], found["key-busy"]}
    await enqueue("rated", "acme")
    await sql.fetch(claim, "rated")
    await sql.execute(
        "select penstock.settle(array[job.id], array[job.attempt], array[job.lease]) from penstock.queued_jobs as job"
        " where name = 'rated'"
    )
    found["key-rate"] = await enqueue("rated", "acme")
    return found


async def test_every_reason_is_the_same_on_every_surface(url: str, sql: Sql, server: Served) -> None:
    async with Penstock(url) as app:
        await app.migrate()
        ids = {**await types(sql), **await pools(sql)}
        # Last, since each claim archives what has expired.
        expired = "update penstock.queued_jobs set expires_at = now() - interval '1 minute' where id = $1"
        await sql.execute(expired, ids["expired"])
        documented = set(re.findall(r"`([a-z-]+)`", str(Why.__doc__)))
        assert set(ids) == documented

        def command(**environment: str) -> list[Any]:
            done = subprocess.run(
                [sys.executable, "-c", COMMANDS, ",".join(map(str, ids.values()))],
                env={**os.environ, "PENSTOCK_DATABASE_URL": url, **environment},
                capture_output=True, text=True, timeout=100, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            return [json.loads(shown)["why"] for shown in done.stdout.split("end\n")[:-1]]

        through = {"PENSTOCK_SERVER_URL": server.base_url, "PENSTOCK_SERVER_TOKEN": f"admin.{TOKEN}"}
        direct, over_http = await asyncio.to_thread(command), await asyncio.to_thread(command, **through)
        as_json = TypeAdapter(Why)
        async with AsyncClient(server.base_url, "admin", TOKEN) as client:
            for (reason, id), by_command, by_server in zip(ids.items(), direct, over_http, strict=True):
                why = await app.why(id)
                row = await sql.fetchrow("select * from penstock.why($1)", id)
                assert why.reason == reason, why
                assert tuple(row) == tuple(asdict(why).values())
                assert await client.why(id) == why
                answer = (await asyncio.to_thread(server.client().get, f"/v1/jobs/job_{id}?details=true")).json()["why"]
                if reason == "finished":
                    assert answer is by_command is by_server is None
                    continue
                for shown in (answer, by_command, by_server):
                    assert as_json.validate_json(json.dumps(shown)) == why
