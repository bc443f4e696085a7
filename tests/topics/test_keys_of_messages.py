"""The key of a message: by a rule at the topic's declaration, or given with a publish; its copies have it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import psycopg
import pytest

from penstock import InvalidInput, Job, NewMessage, Penstock, Status
from penstock.testing import run_due_jobs, running_worker
from penstock.topics import queries as sql_topics

Sql: TypeAlias = "asyncpg.Connection[Any]"


@dataclass
class Delay:
    flight: str
    minutes: int


async def keys_in(sql: Sql, queue: str) -> list[str | None]:
    """Keys of the jobs that wait in a queue, in the order of their messages."""
    rows = await sql.fetch("select key from penstock.queued_jobs where name = $1 order by message", queue)
    return [row["key"] for row in rows]


@pytest.mark.parametrize("key", ["flight", lambda delay: delay.flight], ids=["a field", "a function"])
async def test_copies_have_the_key_of_the_declared_rule_or_that_of_the_call(
    app: Penstock, sql: Sql, key: str | Callable[[Delay], str]
) -> None:
    delays = app.topic("delays", Delay, key=key)
    for client in ("bob", "alice"):
        await delays.subscribe(client)
    await delays.publish(Delay("UA1", 12))
    await delays.publish(Delay("UA1", 12), key="given")
    await delays.publish_many([Delay("UA2", 3), NewMessage(Delay("UA2", 4), key="each"), NewMessage(Delay("UA3", 5), unique="u")])
    expected = ["UA1", "given", "UA2", "each", "UA3"]
    assert [message.key for message in await delays.read()] == expected
    assert await keys_in(sql, "delays_bob") == expected
    assert await keys_in(sql, "delays_alice") == expected


async def test_copies_have_no_key_without_a_rule(app: Penstock, sql: Sql) -> None:
    delays = app.topic("delays", Delay)
    await delays.subscribe("bob")
    await delays.publish(Delay("UA1", 12))
    await delays.publish_many([Delay("UA2", 12)])
    assert await keys_in(sql, "delays_bob") == [None, None]


def test_a_rule_is_checked_where_the_topic_is_declared() -> None:
    app = Penstock("postgresql://localhost/nowhere")
    with pytest.raises(InvalidInput, match="key of topic delays is 'fligt', and Delay has no such field") as refused:
        app.topic("delays", Delay, key="fligt")
    assert "flight" in (refused.value.hint or "")
    with pytest.raises(InvalidInput, match="key of topic delays must be the name of a field or a plain function, not 3"):
        app.topic("delays", Delay, key=3)  # type: ignore[call-overload]
    app.topic("delays", Delay, key="flight")
    with pytest.raises(InvalidInput, match="topic delays is declared twice"):
        app.topic("delays", key="minutes")


async def test_a_message_without_the_field_is_refused_before_anything_is_written(app: Penstock, sql: Sql) -> None:
    delays = app.topic("delays", key="flight")
    await delays.subscribe("bob")
    with pytest.raises(
        InvalidInput, match="a message of topic delays has no field 'flight', which is its declared key"
    ) as refused:
        await delays.publish({"minutes": 12})
    assert "publish(..., key=...)" in (refused.value.hint or "")
    with pytest.raises(InvalidInput, match="key must be text"):
        await delays.publish({"flight": "UA1"}, key=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="invalid key"):
        await delays.publish({"flight": "UA1"}, key="two\nlines")
    assert await sql.fetchval("select count(*) from penstock.topic_messages") == 0


async def test_a_late_subscriber_gets_copies_with_their_keys(app: Penstock, sql: Sql) -> None:
    delays = app.topic("delays", Delay, key="flight", catch_up=2)
    await delays.publish_many([Delay("UA1", 1), Delay("UA2", 2), Delay("UA3", 3)])
    receipt = await delays.subscribe("late")
    assert receipt.replayed == 2
    assert await keys_in(sql, "delays_late") == ["UA2", "UA3"]


async def test_outcomes_name_the_receivers_of_a_message_with_a_key(app: Penstock) -> None:
    delays = app.topic("delays", Delay, key="flight")

    @delays.subscriber("bob")
    async def bob(job: Job[Delay]) -> str | None:
        return job.key

    @delays.subscriber("alice")
    async def alice(job: Job[Delay]) -> int:
        return job.data.minutes

    await app.subscribe(bob, alice)
    receipt = await delays.publish(Delay("UA1", 12))
    waiting = await delays.outcomes(receipt)
    assert [(one.client_id, one.status) for one in waiting.outcomes or []] == [("alice", Status.QUEUED), ("bob", Status.QUEUED)]
    await run_due_jobs(app)
    done = await delays.outcomes(receipt)
    assert {one.client_id: one.result for one in done.outcomes or []} == {"alice": 12, "bob": "UA1"}


async def test_a_copy_coalesces_by_its_unique_key_whatever_its_key(app: Penstock, sql: Sql) -> None:
    delays = app.topic("delays", Delay, key="flight")
    await delays.subscribe("bob")
    first = await delays.publish(Delay("UA1", 1), unique="latest")
    second = await delays.publish(Delay("UA2", 2), unique="latest")
    assert (first.coalesced, second.coalesced) == (0, 1)
    assert await keys_in(sql, "delays_bob") == ["UA1"]
    outcomes = (await delays.outcomes(second)).outcomes or []
    assert [one.client_id for one in outcomes] == ["bob"]


@pytest.mark.parametrize("key", ["UA1", "delays_alice"])
async def test_in_a_queue_that_subscribers_share_the_key_names_the_subscriber(app: Penstock, sql: Sql, key: str) -> None:
    delays = app.topic("delays", Delay, key="flight", catch_up=1)
    await delays.declare()
    await app.job_type("functions").declare()
    database = await app.database()
    await sql_topics.subscribe_many(database, "delays", ["alice"], queue="functions")
    receipt = await delays.publish(Delay(key, 1))
    await sql_topics.subscribe_many(database, "delays", ["late"], queue="functions")
    assert await keys_in(sql, "functions") == ["delays_alice", "delays_late"]
    assert [one.client_id for one in (await delays.outcomes(receipt)).outcomes or []] == ["alice", "late"]


async def test_a_batch_of_a_subscriber_has_messages_of_one_key(app: Penstock) -> None:
    delays = app.topic("delays", Delay, key="flight")
    batches: list[list[tuple[str | None, int]]] = []

    @delays.subscriber("board", max_batch_size=10, batch_by_key=True, linger=timedelta(milliseconds=50))
    async def show(jobs: list[Job[Delay]]) -> None:
        batches.append([(job.key, job.data.minutes) for job in jobs])

    await app.subscribe(show)
    receipts = await delays.publish_many([Delay(f"UA{n % 2}", n) for n in range(8)])
    async with running_worker(app):
        for receipt in receipts:
            assert (await delays.outcomes(receipt, timeout=timedelta(seconds=30))).complete
    assert sorted(each for batch in batches for each in batch) == sorted((f"UA{n % 2}", n) for n in range(8))
    assert all(len({key for key, _ in batch}) == 1 for batch in batches), batches


async def test_the_blocking_half_and_the_callers_transaction_take_a_key(app: Penstock, sql: Sql, url: str) -> None:
    delays = app.topic("delays", Delay, key="flight")
    await delays.subscribe("bob")

    def publish() -> None:
        delays.sync.publish(Delay("UA1", 1))
        with psycopg.connect(url) as connection:
            delays.sync.publish(Delay("UA2", 2), connection=connection)
            delays.sync.publish(Delay("UA2", 2), key="given", connection=connection)

    await asyncio.to_thread(publish)
    assert await keys_in(sql, "delays_bob") == ["UA1", "UA2", "given"]


async def test_the_key_of_an_encrypted_message_stays_readable(url: str, sql: Sql) -> None:
    async with Penstock(url, keys=[bytes(32)]) as app:
        delays = app.topic("delays", Delay, key="flight", encrypted=True)
        await delays.subscribe("bob")
        # No ciphertext in base64 has a space.
        await delays.publish(Delay("UA 1", 12))
    assert await keys_in(sql, "delays_bob") == ["UA 1"]
    stored = await sql.fetchval("select data::text from penstock.topic_messages")
    assert "UA 1" not in stored


async def test_a_publish_in_sql_takes_a_key(app: Penstock, sql: Sql) -> None:
    delays = app.topic("delays")
    await delays.subscribe("bob")
    await sql.execute("select penstock.publish('delays', '{}', p_key => 'a')")
    await sql.execute("""select penstock.publish_json('delays', '{"key": "b"}')""")
    await sql.execute("""select penstock.publish_json('delays', '[{"key": "c"}, {}]')""")
    await sql.execute("select penstock.publish_many('delays', array['{}', '{}']::jsonb[], p_keys => array['d', null])")
    assert await keys_in(sql, "delays_bob") == ["a", "b", "c", None, "d", None]
    for wrong in (
        "select penstock.publish('delays', '{}', p_key => '')",
        "select penstock.publish('delays', '{}', p_key => repeat('x', 256))",
        "select penstock.publish_many('delays', array['{}']::jsonb[], p_keys => array[E'a\\nb'])",
        "select penstock.publish_many('delays', array['{}']::jsonb[], p_keys => array['a', 'b'])",
    ):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await sql.execute(wrong)
        assert refused.value.sqlstate == "PS400", wrong
