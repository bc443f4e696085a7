"""Standing jobs of encrypted pools: payloads, messages, states and errors are stored encrypted, and equal payloads stay equal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock, Pool, Standing
from penstock.core.encryption import new_key
from penstock.errors import InvalidInput, JobFailed
from penstock.testing import running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
WORD = "quokka"


@pytest.fixture
def keys() -> list[str]:
    return [new_key()]


def declared(url: str, keys: list[str], *, encrypted: bool = True, got: list[Any] | None = None) -> tuple[Penstock, Pool[Any]]:
    """An application with a pool whose standing jobs keep what they get in `got`, and fail when their payload says so."""
    app = Penstock(url, keys=keys)
    tenants = app.pool("tenants", encrypted=encrypted)

    @tenants.standing
    async def tenant(job: Standing[Any]) -> AsyncIterator[None]:
        if job.data.get("fail"):
            raise ValueError(f"no such tenant: {WORD}")
        if got is not None:
            got.append((job.data, job.state))
        await job.save({"seen": WORD})
        yield
        job.state = {"left": WORD}

    return app, tenants


async def stored(sql: Sql) -> str:
    """All that the tables of the schema have, as text."""
    found = []
    for (name,) in await sql.fetch("select table_name from information_schema.tables where table_schema = 'penstock'"):
        found += [row[0] for row in await sql.fetch(f'select t::text from penstock."{name}" as t')]
    return "\n".join(found)


async def test_payload_state_and_error_lie_encrypted_and_are_read_with_the_key(url: str, sql: Sql, keys: list[str]) -> None:
    got: list[Any] = []
    app, tenants = declared(url, keys, got=got)
    async with app:
        for _ in range(2):
            async with running_worker(app):
                await tenants.start("acme", {"word": WORD}, timeout=timedelta(seconds=20))
        assert got == [({"word": WORD}, None), ({"word": WORD}, {"left": WORD})]
        async with running_worker(app):
            with pytest.raises(JobFailed, match=f"ValueError: no such tenant: {WORD}"):
                await tenants.start("bolt", {"fail": True}, timeout=timedelta(seconds=20))
        acme, bolt = await tenants.standing_jobs()
        assert (acme.data, acme.state) == ({"word": WORD}, {"left": WORD})
        assert bolt.error is not None and bolt.error["message"] == f"no such tenant: {WORD}"
        assert WORD not in await stored(sql)
        async with Penstock(url) as keyless:
            acme, bolt = await (await keyless.find_pool("tenants")).standing_jobs()
            assert (acme.data, acme.state) == ("encrypted", "encrypted")
            assert bolt.error == {"type": "ValueError", "message": "encrypted"}


async def test_messages_lie_encrypted(url: str, sql: Sql, keys: list[str]) -> None:
    app = Penstock(url, keys=keys)
    tenants = app.pool("tenants", encrypted=True)
    seen: list[Any] = []

    @tenants.standing
    async def tenant(job: Standing[Any]) -> None:
        async for message in job.messages():
            seen.append(message)

    async with app:
        await tenants.start("acme")
        await tenants.notify("acme", {"word": WORD})
        assert WORD not in await stored(sql)
        async with running_worker(app):
            await eventually(lambda: seen, "the message")
    assert seen == [{"word": WORD}]


async def test_equal_payloads_are_unchanged_also_after_a_rotation(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()
    app, tenants = declared(url, [old])
    async with app:
        assert await tenants.start("acme", {"n": 1}) == "starting"
        assert await tenants.start("acme", {"n": 1}) == "unchanged"
        assert await tenants.reconcile({"acme": {"n": 1}, "bolt": {"n": 2}}) == (1, 0, 0)
    app, tenants = declared(url, [new, old])
    async with app:
        assert await tenants.start("acme", {"n": 1}) == "unchanged"
        assert await tenants.reconcile({"acme": {"n": 1}, "bolt": {"n": 3}}) == (0, 1, 0)
        kids = dict(await sql.fetch("select key, data #>> '{penstock,kid}' from penstock.standing_jobs"))
        assert kids == {"acme": app.context.keyring.ids[1], "bolt": app.context.keyring.ids[0]}
        assert [job.data for job in await tenants.standing_jobs()] == [{"n": 1}, {"n": 3}]


async def test_payloads_from_before_are_replaced_by_their_envelopes(url: str, sql: Sql, keys: list[str]) -> None:
    app, tenants = declared(url, keys, encrypted=False)
    async with app:
        await tenants.reconcile({"acme": {"n": 1}, "bolt": {"n": 2}})
    app, tenants = declared(url, keys)
    async with app:
        assert await tenants.start("acme", {"n": 1}) == "replaced"
        assert await tenants.reconcile({"acme": {"n": 1}, "bolt": {"n": 2}}) == (0, 1, 0)
        assert await sql.fetchval("select bool_and(penstock.is_envelope(data)) from penstock.standing_jobs")


PLAIN_WRITES = [
    "select penstock.start_standing('tenants', 'acme', '{\"card\": 1}')",
    "select penstock.start_standing('tenants', 'acme')",
    "select penstock.notify_standing('tenants', 'acme', '{}')",
    "select * from penstock.reconcile_standing('tenants', '{\"acme\": {}}')",
]


@pytest.mark.parametrize("statement", PLAIN_WRITES)
async def test_a_controller_without_a_key_is_refused_with_the_reason(url: str, sql: Sql, keys: list[str], statement: str) -> None:
    app, tenants = declared(url, keys)
    keyless, its = declared(url, [])
    async with app, keyless:
        await tenants.start("acme", {"n": 1})
        with pytest.raises(asyncpg.PostgresError, match="pool tenants is encrypted, and document 1 of 1 is not") as refused:
            await sql.execute(statement)
        assert refused.value.sqlstate == "PS400"
        assert await its.reconcile({}) == (0, 0, 1)  # to stop needs no key
        for call in (its.start("bolt", {}), its.notify("acme", {}), its.reconcile({"bolt": {}})):
            with pytest.raises(InvalidInput, match="pool tenants is encrypted, and this application has no key"):
                await call


async def test_what_an_older_worker_reports_in_plain_is_left_out(url: str, sql: Sql, keys: list[str]) -> None:
    app, tenants = declared(url, keys)
    async with app:
        await tenants.start("acme", {"n": 1})
        await sql.execute("update penstock.standing_jobs set running_by = 'old', running_epoch = 1")
        assert await sql.fetchval("""select penstock.save_standing('tenants', 'acme', 'old', 1, '"quokka"')""")
        assert await sql.fetchval(
            "select penstock.end_standing('tenants', 'acme', 'old', 1, $1, $2)",
            '"quokka"',
            '{"type": "KeyError", "message": "quokka"}',
        )
        row = await sql.fetchrow("select state, error ->> 'type' as type, data from penstock.standing_jobs")
        assert (row["state"], row["type"]) == (None, "KeyError")
        assert WORD not in await stored(sql)


async def test_the_envelope_of_another_key_does_not_open(url: str, sql: Sql, keys: list[str]) -> None:
    app, tenants = declared(url, keys)
    async with app:
        await tenants.start("acme", {"n": 1})
        await sql.execute(
            "select penstock.start_standing('tenants', 'bolt', (select data from penstock.standing_jobs where key = 'acme'))"
        )
        async with running_worker(app):
            error = await eventually(
                lambda: sql.fetchval("select error ->> 'type' from penstock.standing_jobs where key = 'bolt'"), "the failure"
            )
        assert error == "Unreadable"
        assert [job.data for job in await tenants.standing_jobs()] == [{"n": 1}, "encrypted"]
