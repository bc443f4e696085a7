"""Encrypted topics: a message is stored once, encrypted, and its copies decrypt in the workers of the subscribers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Job, NewMessage, Penstock, Topic
from penstock.core.encryption import key_id_of, new_key
from penstock.errors import InvalidInput, Unreadable
from penstock.testing import run_due_jobs, running_worker
from penstock.worker.fleets import workers
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
WORD = "quokka"


@pytest.fixture
def keys() -> list[str]:
    return [new_key()]


def declared(url: str, keys: list[str], *, encrypted: bool = True, subscribers: bool = True) -> tuple[Penstock, Topic[Any]]:
    """An application and its topic, with two subscribers of which one fails when the message says so."""
    app = Penstock(url, keys=keys)
    delays = app.topic("delays", catch_up=5, encrypted=encrypted)
    if subscribers:

        @delays.subscriber("JFK", max_attempts=1)
        async def at_jfk(job: Job[dict[str, Any]]) -> Any:
            job.progress({"half": WORD})
            job.log(f"told {WORD}")
            return {"told": job.data}

        @delays.subscriber("LHR", max_attempts=1)
        async def at_lhr(job: Job[dict[str, Any]]) -> Any:
            if job.data.get("fail"):
                raise ValueError(f"nobody at the gate: {WORD}")

    return app, delays


async def stored(sql: Sql) -> str:
    """All that the tables of the schema have, as text."""
    found = []
    for (name,) in await sql.fetch("select table_name from information_schema.tables where table_schema = 'penstock'"):
        found += [row[0] for row in await sql.fetch(f'select t::text from penstock."{name}" as t')]
    return "\n".join(found)


async def test_a_message_lies_encrypted_once_and_its_copies_are_read_with_the_key(url: str, sql: Sql, keys: list[str]) -> None:
    app, delays = declared(url, keys)
    async with app:
        await app.subscribe()
        await delays.publish({"minutes": 12, "word": WORD})
        await delays.publish_many([{"fail": WORD}, NewMessage({"word": WORD}, unique="u")])
        texts = [row[0] for row in await sql.fetch("select data::text from penstock.topic_messages")]
        assert len(texts) == 3 and {key_id_of(text) for text in texts} == set(app.context.keyring.ids)
        records = await run_due_jobs(app)
        assert WORD not in await stored(sql)
        assert sorted((record.name, str(record.status)) for record in records) == [
            *[("delays_JFK", "succeeded")] * 3, ("delays_LHR", "failed"), *[("delays_LHR", "succeeded")] * 2,
        ]  # fmt: skip
        told = next(record for record in records if record.name == "delays_JFK")
        assert told.data["word" if "word" in told.data else "fail"] == WORD and told.result == {"told": told.data}
        assert [line.line for line in told.log] == [f"told {WORD}"]
        assert (await delays.read())[0].data == {"minutes": 12, "word": WORD}
        async with Penstock(url) as keyless:
            with pytest.raises(Unreadable, match="encrypted with the key"):
                await (await keyless.find_topic("delays")).read()
        async with Penstock(url, keys=keys) as other:
            by_name = await other.find_topic("delays")
            assert len(await by_name.read()) == 3
            await by_name.publish({"word": WORD})
        assert WORD not in await stored(sql)


async def test_a_publisher_that_waits_gets_results_and_errors(url: str, sql: Sql, keys: list[str]) -> None:
    app, delays = declared(url, keys)
    async with app, running_worker(app):
        receipt = await delays.publish({"fail": True}, background=False)
        outcomes = {outcome.client_id: outcome for outcome in receipt.outcomes or []}
        assert outcomes["JFK"].result == {"told": {"fail": True}}
        assert outcomes["LHR"].errors[0]["message"] == f"nobody at the gate: {WORD}"
        assert WORD not in await stored(sql)


PLAIN_WRITES = [
    "select penstock.publish('delays', '{\"card\": 1}')",
    "select penstock.publish('delays')",
    "select penstock.publish_many('delays', array['{}'::jsonb])",
    "select penstock.publish_json('delays', '[{\"data\": {\"card\": 1}}, {}]')",
]


@pytest.mark.parametrize("statement", PLAIN_WRITES)
async def test_a_publisher_without_a_key_is_refused_with_the_reason(url: str, sql: Sql, keys: list[str], statement: str) -> None:
    app, _ = declared(url, keys)
    async with app:
        await app.subscribe()
        with pytest.raises(asyncpg.PostgresError, match="topic delays is encrypted, and document 1 of") as refused:
            await sql.execute(statement)
        assert refused.value.sqlstate == "PS400"
        assert await sql.fetchval("select count(*) from penstock.topic_messages") == 0
        assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0


async def test_an_application_without_a_key_or_with_an_older_declaration_is_refused(url: str, keys: list[str]) -> None:
    app, delays = declared(url, keys, subscribers=False)
    async with app:
        await delays.declare()
        keyless, its = declared(url, [], subscribers=False)
        async with keyless:
            with pytest.raises(InvalidInput, match="message delays is encrypted, and this application has no key"):
                await its.publish({"n": 1})
            with pytest.raises(InvalidInput, match="this application has no key"):
                await its.publish()
        older, its = declared(url, keys, encrypted=False, subscribers=False)
        async with older:
            with pytest.raises(InvalidInput, match="topic delays is encrypted, and document 1 of 1 is not"):
                await its.publish({"n": 1})
            assert (await its.details()).encrypted, "a declaration never turns encryption off"


async def test_filters_and_shared_queues_are_refused(url: str, sql: Sql, keys: list[str]) -> None:
    app, delays = declared(url, keys, subscribers=False)
    async with app:
        with pytest.raises(InvalidInput, match="cannot have a filter"):
            delays.subscriber("SFO", filter={"dest": "SFO"})
        with pytest.raises(InvalidInput, match="cannot have a filter"):
            await delays.subscribe("SFO", filter={"dest": "SFO"})
        with pytest.raises(InvalidInput, match="encrypted=False of delays_SFO is not possible"):
            delays.subscriber("SFO", encrypted=False)
        await delays.declare()
        await sql.execute("select penstock.create_job_type('shared')")
        for statement in (
            "select penstock.subscribe('delays', 'SFO', p_filter => '{}')",
            "select penstock.subscribe('delays', 'SFO', p_queue => 'shared')",
        ):
            with pytest.raises(asyncpg.PostgresError, match="topic delays is encrypted, and client SFO has a filter or a queue"):
                await sql.execute(statement)
        filtered = app.topic("filtered")
        await filtered.subscribe("SFO", filter={"dest": "SFO"})
        with pytest.raises(asyncpg.PostgresError, match="topic filtered is encrypted, and client SFO has a filter"):
            await sql.execute("""select penstock.declare_topic('filtered', '{"encrypted": true}')""")


async def test_turning_encryption_on_and_off_leaves_no_copy_behind(url: str, sql: Sql, keys: list[str]) -> None:
    before, delays = declared(url, keys, encrypted=False)
    async with before:
        await before.subscribe()
        await delays.publish({"n": 1})
    app, delays = declared(url, keys)
    async with app:
        await delays.publish({"n": 2})
        assert await sql.fetchval("select bool_and(encrypted) from penstock.jobs where topic = 'delays'")
        await sql.execute("""select penstock.declare_topic('delays', '{"encrypted": false}')""")
        await sql.execute("select penstock.publish('delays', '{\"n\": 3}')")
        assert [message.data["n"] for message in await delays.read()] == [1, 2, 3]
        records = await run_due_jobs(app, "delays_JFK")
        assert sorted(record.data["n"] for record in records) == [1, 2, 3]


async def test_a_subscriber_that_comes_later_gets_the_messages_that_are_kept(url: str, keys: list[str]) -> None:
    app, delays = declared(url, keys)
    async with app:
        await delays.publish({"n": 1})
        await app.subscribe()
        assert [record.data for record in await run_due_jobs(app, "delays_JFK")] == [{"n": 1}]


async def test_a_worker_without_a_key_does_not_claim_copies_and_says_so(url: str, sql: Sql, keys: list[str]) -> None:
    app, delays = declared(url, keys)
    keyless, _ = declared(url, [])
    async with app, keyless:
        await app.subscribe()
        await delays.publish({"n": 1})
        async with running_worker(keyless):
            await eventually(lambda: sql.fetchval("select no_key ? 'delays_JFK' from penstock.workers"), "that it says so")
            assert [one.no_key for one in await workers(await keyless.database())] == [{"delays_JFK": None, "delays_LHR": None}]
        assert await sql.fetchval("select count(*) from penstock.queued_jobs where status = 'queued' and attempt = 1") == 2
        assert len(await run_due_jobs(app)) == 2


async def test_old_messages_are_read_and_new_ones_written_with_the_new_key(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()
    app, delays = declared(url, [old])
    async with app:
        await app.subscribe()
        await delays.publish({"n": 1})
    app, delays = declared(url, [new, old])
    async with app:
        await delays.publish({"n": 2})
        ids = [key_id_of(row[0]) for row in await sql.fetch("select data::text from penstock.topic_messages order by seq")]
        assert ids == [app.context.keyring.ids[1], app.context.keyring.ids[0]]
        assert sorted(record.data["n"] for record in await run_due_jobs(app, "delays_JFK")) == [1, 2]


async def test_a_connection_that_says_it_has_no_key_cannot_subscribe(url: str, sql: Sql, keys: list[str]) -> None:
    app, delays = declared(url, keys, subscribers=False)
    async with app:
        await delays.declare()
        with pytest.raises(asyncpg.PostgresError, match="topic delays is encrypted, and subscriber browser has no key"):
            await sql.execute("""select penstock.subscribe('delays', 'browser', p_options => '{"encrypted": false}')""")
        assert await sql.fetchval("select count(*) from penstock.subscriptions") == 0
        await delays.subscribe("browser", ttl=timedelta(minutes=1))
        assert await sql.fetchval("select encrypted from penstock.jobs where name = 'delays_browser'")


async def test_publishing_in_the_callers_transaction_is_encrypted(url: str, sql: Sql, keys: list[str]) -> None:
    app, delays = declared(url, keys)
    async with app:
        await app.subscribe()
        async with sql.transaction():
            await delays.publish({"word": WORD}, connection=sql)
        assert WORD not in await stored(sql)
        assert [record.data for record in await run_due_jobs(app, "delays_LHR")] == [{"word": WORD}]
