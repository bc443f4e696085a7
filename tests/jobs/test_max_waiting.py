"""Bounds of what waits: an enqueue beyond them is refused before anything is written."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import psycopg
import pytest

from penstock import EnqueueOutcome, InvalidInput, Job, NewJob, Penstock, QueueFull
from penstock.testing import run_due

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_an_enqueue_into_a_full_queue_is_refused_until_a_job_is_taken(app: Penstock, sql: Sql) -> None:
    mail = app.job_type("mail", max_waiting=3)
    await mail.enqueue_many([1, NewJob(2, run_after=timedelta(hours=1)), NewJob(3, priority=5)])
    with pytest.raises(QueueFull, match="the queue of mail is full: 3 of at most 3 jobs wait, and 1 more do not fit"):
        await mail.enqueue(4)
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 3
    assert await sql.fetchval("select count(*) from penstock.claim('w', array['mail'], 1)") == 1
    await mail.enqueue(5)
    with pytest.raises(QueueFull):
        await mail.enqueue(6)


async def test_a_batch_is_refused_as_a_whole(app: Penstock) -> None:
    mail = app.job_type("mail", max_waiting=3)
    await mail.enqueue(1)
    with pytest.raises(QueueFull, match="1 of at most 3 jobs wait, and 3 more do not fit"):
        await mail.enqueue_many([2, 3, 4])
    assert len(await app.find_many(name="mail")) == 1
    await mail.enqueue_many([2, 3])


async def test_a_job_that_is_known_or_coalesces_takes_no_place(app: Penstock) -> None:
    @app.job("mail", max_waiting=2)
    async def mail(job: Job[int]) -> None: ...

    ended = await mail.options(unique="v", unique_for=timedelta(hours=1)).enqueue(0)
    await run_due(app)
    first = await mail.options(unique="u").enqueue(1)
    await mail.enqueue(2)
    assert (await mail.options(id=first.id).enqueue(1)).outcome == EnqueueOutcome.DUPLICATE
    assert (await mail.options(id=ended.id).enqueue(0)).outcome == EnqueueOutcome.ARCHIVED
    assert (await mail.options(unique="u").enqueue(3)).outcome == EnqueueOutcome.COALESCED
    assert (await mail.options(unique="v", unique_for=timedelta(hours=1)).enqueue(3)).outcome == EnqueueOutcome.COALESCED
    with pytest.raises(QueueFull):
        await mail.options(unique="w").enqueue(4)


async def test_the_bound_of_a_key_leaves_other_keys_alone(app: Penstock, sql: Sql) -> None:
    pool = app.pool("bolts", payload=int, key_max_waiting=2, max_waiting=4)
    await pool.enqueue("acme", 1)
    await pool.enqueue("acme", 2, run_after=timedelta(hours=1))
    with pytest.raises(QueueFull, match="the key acme of bolts is full: 2 of at most 2 jobs wait, and 1 more do not fit"):
        await pool.enqueue("acme", 3)
    await pool.enqueue_many([("globex", 1), ("initech", 1)])
    with pytest.raises(QueueFull, match="the queue of bolts is full: 4 of at most 4"):
        await pool.enqueue("globex", 2)
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 4


async def test_in_a_callers_transaction_it_is_the_same_error(app: Penstock, url: str, sql: Sql) -> None:
    mail = app.job_type("mail", max_waiting=1)
    await mail.enqueue(1)
    with pytest.raises(QueueFull):
        async with sql.transaction():
            await mail.options(connection=sql).enqueue(2)
    async with await psycopg.AsyncConnection.connect(url) as connection:
        with pytest.raises(QueueFull):
            await mail.options(connection=connection).enqueue(2)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute("select penstock.enqueue('mail')")
    assert refused.value.sqlstate == "PS429"


async def test_it_is_shown_and_changed_like_other_options(app: Penstock, sql: Sql) -> None:
    mail = app.job_type("mail", max_waiting=1)
    pool = app.pool("bolts", key_max_waiting=7)
    await app.declare()
    (details,) = await app.list_pools()
    assert details.key_max_waiting == 7
    assert {record.name: record.max_waiting for record in await app.job_types()} == {"mail": 1, "bolts": None}
    await sql.execute("""select penstock.change_pool('bolts', '{"key_max_waiting": 1}')""")
    await pool.enqueue("acme", 1)
    with pytest.raises(QueueFull):
        await pool.enqueue("acme", 2)
    assert (await app.change_job_type("mail", max_waiting=None)).max_waiting is None
    await mail.enqueue_many([1, 2, 3])


async def test_a_bound_that_is_not_possible_is_refused(app: Penstock, sql: Sql) -> None:
    with pytest.raises(InvalidInput, match="max_waiting of mail"):
        app.job_type("mail", max_waiting=0)
    with pytest.raises(InvalidInput, match="key_max_waiting of bolts"):
        app.pool("bolts", key_max_waiting=0)
    with pytest.raises(InvalidInput, match="max_waiting must be at least 1, not 0"):
        await app.create_job_type("mail", max_waiting=0)
    with pytest.raises(InvalidInput, match="each subscriber gets each message"):
        app.topic("news").subscriber("bob", max_waiting=5)
    await sql.execute("select penstock.declare_topic('news')")
    with pytest.raises(asyncpg.PostgresError, match="the queue of a subscriber has no max_waiting"):
        await sql.execute("""select penstock.subscribe('news', 'bob', p_options => '{"max_waiting": 5}')""")
