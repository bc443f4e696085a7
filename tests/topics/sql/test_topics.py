"""Topics: what is published reaches every subscriber of that moment, exactly once."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import psycopg
import pytest

from penstock import Conflict, InvalidInput, Job, NewMessage, NotFound, Penstock, Status, Topic
from penstock.testing import run_due_jobs
from penstock.topics import queries as sql_topics
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture
def memos(app: Penstock) -> Topic[Any]:
    return app.topic("memos")


async def copies(app: Penstock, queue: str) -> list[Any]:
    """The payloads that wait in a queue, in its order, through a claim."""
    rows = await (await app.database()).fetch("select data from penstock.claim('reader', array[$1], 1000)", queue)
    import orjson

    return [orjson.loads(row["data"]) for row in rows]


async def test_every_subscriber_gets_its_own_copy_and_the_payload_stands_once(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    for client in ("bob", "alice"):
        assert (await memos.subscribe(client)).created
    receipt = await memos.publish({"text": "go home"})
    assert (receipt.seq, receipt.receivers, receipt.coalesced, receipt.duplicate) == (1, 2, 0, False)
    assert await sql.fetchval("select count(*) from penstock.queued_jobs where data = 'null'") == 2
    assert await copies(app, "memos_bob") == [{"text": "go home"}]
    assert await copies(app, "memos_alice") == [{"text": "go home"}]


async def test_a_publish_without_subscribers_is_no_error(memos: Topic[Any]) -> None:
    assert (await memos.publish("anybody?")).receivers == 0


async def test_subscribe_is_idempotent_and_takes_over_a_new_filter(app: Penstock, memos: Topic[Any]) -> None:
    first = await memos.subscribe("bob")
    again = await memos.subscribe("bob", filter={"to": "bob"})
    assert (first.created, again.created) == (True, False)
    assert (await memos.publish({"to": "all"})).receivers == 0
    assert (await memos.publish({"to": "bob", "n": 1})).receivers == 1
    assert await copies(app, "memos_bob") == [{"to": "bob", "n": 1}]


async def test_unsubscribe_ends_it_and_what_waits_can_still_be_worked(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    await memos.subscribe("bob")
    await memos.publish(1)
    assert await memos.unsubscribe("bob")
    assert not await memos.unsubscribe("bob")
    assert (await memos.publish(2)).receivers == 0
    assert await sql_topics.maintain(await app.database()) == (0, 0)
    receipt = (await sql.fetch("select id, attempt, lease from penstock.claim('w', '{memos_bob}', 10)"))[0]
    await sql.execute("select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])", *receipt)
    await sql.execute("update penstock.ended_queues set look_at = now()")
    assert await sql_topics.maintain(await app.database()) == (0, 1)
    assert await sql.fetchval("select count(*) from penstock.jobs") == 0


async def test_unsubscribe_with_drop_takes_the_queue_away(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    await memos.subscribe("bob")
    first = await memos.publish(1)
    await memos.publish(2, run_after=timedelta(hours=1))
    await memos.unsubscribe("bob", drop=True)
    assert await sql_topics.maintain(await app.database()) == (0, 1)
    assert [o.status for o in (await memos.outcomes(first)).outcomes or []] == [Status.EXPIRED]
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0
    with pytest.raises(NotFound):
        await app.enqueue("memos_bob", 3)


async def test_the_same_id_is_the_same_message(app: Penstock, memos: Topic[Any]) -> None:
    await memos.subscribe("bob")
    id = uuid.uuid4()
    receipts = [await memos.publish("once", id=id) for _ in range(3)]
    assert [r.duplicate for r in receipts] == [False, True, True]
    assert {(r.id, r.seq, r.receivers) for r in receipts} == {(id, 1, 1)}
    assert await copies(app, "memos_bob") == ["once"]
    with pytest.raises(Conflict, match="was published to another topic"):
        await app.topic("other").publish("once", id=id)


async def test_many_messages_are_published_in_order_and_once(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    await memos.subscribe("bob")
    await memos.subscribe("even", filter={"even": True})
    ids = [uuid.uuid4() for _ in range(2500)]
    payloads = [{"n": n, "even": n % 2 == 0} for n in range(2500)]
    await memos.publish(payloads[7], id=ids[7])
    receipts = await memos.publish_many(payloads, ids=ids)
    assert [r.duplicate for r in receipts] == [n == 7 for n in range(2500)]
    assert [r.seq for r in receipts] == [2, 3, 4, 5, 6, 7, 8, 1, *range(9, 2501)]
    assert [r.receivers for r in receipts] == [2, 1] * 1250
    assert [m.seq for m in await memos.read(limit=3000)] == list(range(1, 2501))
    assert all(r.duplicate for r in await memos.publish_many(payloads, ids=ids))
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 2500 + 1250
    assert [d["n"] for d in await copies(app, "memos_even")] == list(range(0, 2000, 2))
    assert await memos.publish_many([]) == []


async def test_each_of_many_messages_has_options_of_its_own(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    await memos.subscribe("bob")
    await memos.subscribe("alice", filter={"for": "alice"})
    soon, id = timedelta(hours=1), uuid.uuid4()
    plain = [NewMessage({"n": 0}, id), NewMessage({"n": 1}, run_after=soon), {"n": 2}, NewMessage({"n": 3}, expires_at=soon)]
    assert [(r.id == id, r.seq, r.receivers) for r in await memos.publish_many(plain)] == [
        (True, 1, 1), (False, 2, 1), (False, 3, 1), (False, 4, 1),
    ]  # fmt: skip
    rows = await sql.fetch(
        "select seq is null as deferred, run_after > now() as later, expires_at > now() as expires"
        " from penstock.queued_jobs order by id"
    )
    assert [tuple(row) for row in rows] == [
        (False, False, None), (True, True, None), (False, False, None), (False, False, True),
    ]  # fmt: skip

    keyed = [
        NewMessage({"n": 4, "for": "alice"}, unique="u"), NewMessage({"n": 5}), NewMessage({"n": 0}, id),
        NewMessage({"n": 6}, unique="u"), NewMessage({"n": 7}, unique="v", run_after=soon),
    ]  # fmt: skip
    receipts = await memos.publish_many(keyed)
    assert [(r.seq, r.receivers, r.coalesced, r.duplicate) for r in receipts] == [
        (5, 2, 0, False), (6, 1, 0, False), (1, 1, 0, True), (7, 1, 1, False), (8, 1, 0, False),
    ]  # fmt: skip
    assert [d["n"] for d in await copies(app, "memos_alice")] == [4]
    assert [d["n"] for d in await copies(app, "memos_bob")] == [0, 2, 3, 4, 5]
    assert [m.seq for m in await memos.read()] == list(range(1, 9))


async def test_many_messages_are_part_of_the_callers_transaction(app: Penstock, memos: Topic[Any], url: str, sql: Sql) -> None:
    await memos.subscribe("bob")
    new = [NewMessage(n, unique=str(n % 2) if n > 1 else None) for n in range(6)]
    async with await psycopg.AsyncConnection.connect(url) as connection:
        assert [r.seq for r in await memos.publish_many(new, connection=connection)] == [1, 2, 3, 4, 5, 6]
        await connection.rollback()
        assert await memos.read() == []
        receipts = await memos.publish_many(new, connection=connection)
        assert [(r.receivers, r.coalesced) for r in receipts] == [(1, 0)] * 4 + [(1, 1)] * 2
    transaction = sql.transaction()
    await transaction.start()
    with pytest.raises(InvalidInput, match="unique key"):
        await memos.publish_many([*new, NewMessage(9, unique="\n")], connection=sql)
    await transaction.rollback()
    assert [m.data for m in await memos.read()] == [0, 1, 2, 3, 4, 5]
    assert await copies(app, "memos_bob") == [0, 1, 2, 3]


async def test_an_id_that_another_topic_uses_at_the_same_moment_is_a_conflict(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    await memos.declare()
    other = app.topic("other")
    await other.declare()
    id = uuid.uuid4()
    transaction = sql.transaction()
    await transaction.start()
    await memos.publish(1, id=id, connection=sql)
    waiting = asyncio.create_task(other.publish_many([0, 1], ids=[uuid.uuid4(), id]))
    blocked = "select count(*) from pg_locks where not granted and locktype = 'transactionid'"
    await eventually(lambda: sql.fetchval(blocked), "the other publisher to wait")
    await transaction.commit()
    with pytest.raises(Conflict, match="another topic"):
        await waiting
    assert await other.read() == []


async def test_unique_coalesces_for_each_subscriber(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    await memos.subscribe("bob")
    assert (await memos.publish("first", unique="u")).coalesced == 0
    await memos.subscribe("alice")
    second = await memos.publish("second", unique="u")
    assert (second.receivers, second.coalesced) == (2, 1)
    assert await copies(app, "memos_bob") == ["first"]
    third = await memos.publish("third", unique="u")  # bob's is claimed by now
    assert (third.receivers, third.coalesced) == (2, 1)
    outcomes = (await memos.outcomes(second)).outcomes or []
    assert [(o.client_id, o.status) for o in outcomes] == [("alice", Status.QUEUED), ("bob", Status.IN_PROGRESS)]


async def test_run_after_and_expires_at_hold_for_each_copy(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    await memos.subscribe("bob")
    await memos.publish("later", run_after=timedelta(hours=1))
    await memos.publish("brief", expires_at=timedelta(milliseconds=1))
    async with asyncio.timeout(60):
        while not await sql.fetchval("select penstock.expire()"):
            await asyncio.sleep(0.005)
    assert await copies(app, "memos_bob") == []
    assert await sql.fetchval("select count(*) from penstock.queued_jobs where seq is null") == 1


async def test_a_publish_is_part_of_the_callers_transaction(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    await memos.subscribe("bob")
    transaction = sql.transaction()
    await transaction.start()
    receipt = await memos.publish("unsaid", connection=sql)
    assert receipt.receivers == 1
    await transaction.rollback()
    assert await memos.read() == []
    assert await copies(app, "memos_bob") == []
    async with sql.transaction():
        await memos.publish("said", connection=sql)
    assert [m.data for m in await memos.read()] == ["said"]
    with pytest.raises(InvalidInput, match="receivers see a message only after the commit"):
        await memos.publish("x", background=False, connection=sql)


async def test_late_joiners_get_the_last_messages_that_the_topic_keeps(app: Penstock) -> None:
    news = app.topic("news", catch_up=2)
    for n in range(5):
        await news.publish(n)
    receipt = await news.subscribe("bob")
    assert (receipt.seq, receipt.replayed) == (5, 2)
    await news.publish(5)
    assert await copies(app, "news_bob") == [3, 4, 5]


async def test_a_client_that_was_away_reads_on_from_what_it_saw_last(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    for n in range(1, 6):
        await memos.publish(n)
    assert [(m.seq, m.data) for m in await memos.read(3)] == [(4, 4), (5, 5)]
    assert (await memos.subscribe("bob", since=3)).replayed == 2
    assert await copies(app, "memos_bob") == [4, 5]
    assert await sql_topics.prune_messages(await app.database(), timedelta(0)) == 3
    with pytest.raises(Conflict, match="after 1 are gone"):
        await memos.subscribe("alice", since=1)
    with pytest.raises(Conflict, match="are gone"):
        await memos.read(0)
    with pytest.raises(InvalidInput, match="no message 9"):
        await memos.read(9)
    assert [m.seq for m in await memos.read(3)] == [4, 5]


async def test_names_that_collide_are_refused(app: Penstock) -> None:
    await app.topic("a_b").subscribe("c")
    with pytest.raises(Conflict, match="the name a_b_c is taken"):
        await app.topic("a").subscribe("b_c")
    await app.enqueue_many(app.job_type("a_plain"), [])
    with pytest.raises(Conflict, match="the name a_plain is taken"):
        await app.topic("a").subscribe("plain")


async def test_a_subscription_that_is_not_renewed_ends_with_its_queue(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    old = "select pg_postmaster_start_time() < now() - interval '2 s'"
    await eventually(lambda: sql.fetchval(old), "the server to be up for longer than the time to live")
    for client in ("bob", "alice"):
        await memos.subscribe(client, ttl=timedelta(seconds=60))
    assert (await memos.publish("both")).receivers == 2
    # The time to live of one has passed.
    await sql.execute(
        "update penstock.subscriptions set ttl = '1 s', expires_at = now() - interval '1 s' where client_id = 'bob'"
    )
    assert not await memos.renew("bob")
    assert await memos.renew("alice")
    assert (await memos.publish("alice only")).receivers == 1
    # Its queue is kept for as long again, for a worker that was cut off.
    kept = "select queue, look_at - ended_at from penstock.ended_queues"
    assert [tuple(row) for row in await sql.fetch(kept)] == [("memos_bob", timedelta(seconds=1))]
    await sql.execute("update penstock.ended_queues set look_at = now() + interval '1 minute'")
    assert await sql_topics.maintain(await app.database()) == (0, 0)
    await sql.execute("update penstock.ended_queues set look_at = now()")
    assert await sql_topics.maintain(await app.database()) == (0, 1)
    assert [s.client_id for s in await memos.subscribers()] == ["alice"]
    assert await sql.fetchval("select status::text from penstock.archived_jobs where name = 'memos_bob'") == "expired"
    assert (await memos.subscribe("bob")).created


async def test_workers_keep_their_subscriptions_and_maintain_those_of_others(url: str, sql: Sql) -> None:
    app = Penstock(url)
    memos = app.topic("memos")

    @memos.subscriber("live", ttl=timedelta(seconds=3))
    async def live(job: Job[int]) -> int:
        return job.data

    async with app:
        worker = await app.worker()
        working = asyncio.create_task(worker.run())
        await worker.started()
        await memos.subscribe("dead", ttl=timedelta(seconds=1))
        await memos.publish(1)

        async def only_live() -> bool:
            queues = await sql.fetchval("select array_agg(name order by name) from penstock.jobs")
            return bool(queues == ["memos_live"])

        await eventually(only_live, "the end of the dead subscriber's queue")
        outlived = "select expires_at > created_at + 2 * ttl from penstock.subscriptions where client_id = 'live'"
        await eventually(lambda: sql.fetchval(outlived), "a renewal after the first time to live")
        receipt = await memos.publish(2, background=False)
        assert [(o.client_id, o.result) for o in receipt.outcomes or []] == [("live", 2)]
        worker.stop()
        await working


async def test_who_waits_gets_every_outcome_and_partial_ones_at_the_time_limit(app: Penstock, memos: Topic[Any]) -> None:
    @memos.subscriber("good")
    async def good(job: Job[int]) -> str:
        return f"got {job.data}"

    @memos.subscriber("bad", max_attempts=1)
    async def bad(job: Job[int]) -> None:
        raise ValueError("no")

    worker = await app.worker()
    working = asyncio.create_task(worker.run())
    await worker.started()
    receipt = await memos.publish(7, background=False)
    assert receipt.complete
    outcomes = {o.client_id: o for o in receipt.outcomes or []}
    assert (outcomes["good"].status, outcomes["good"].result) == (Status.SUCCEEDED, "got 7")
    assert (outcomes["bad"].status, outcomes["bad"].errors[0]["message"]) == (Status.FAILED, "no")
    await memos.subscribe("absent")
    partial = await memos.publish(8, background=False, timeout=timedelta(seconds=1))
    assert not partial.complete
    assert {o.client_id for o in partial.outcomes or []} == {"good", "bad", "absent"}

    async def all_but_one() -> bool:
        known = await memos.outcomes(partial, timeout=timedelta(milliseconds=100))
        assert not known.complete
        return {o.client_id: o.status for o in known.outcomes or []} == {
            "good": Status.SUCCEEDED,
            "bad": Status.FAILED,
            "absent": Status.QUEUED,
        }

    await eventually(all_but_one, "the outcomes of those that work")
    worker.stop()
    await working


async def test_workers_of_one_client_id_share_its_copies(app: Penstock, memos: Topic[Any]) -> None:
    await memos.subscribe("team")
    for n in range(10):
        await memos.publish(n)
    database = await app.database()
    one = await database.fetch("select id from penstock.claim('w1', '{memos_team}', 5)")
    two = await database.fetch("select id from penstock.claim('w2', '{memos_team}', 5)")
    assert len({row["id"] for row in one + two}) == 10


@dataclass
class Delay:
    dest: str
    minutes: float


async def test_typed_messages_reach_their_handlers(app: Penstock) -> None:
    delays = app.topic("delays", Delay)
    seen: list[Any] = []

    @delays.subscriber("JFK", filter={"dest": "JFK"})
    async def at_jfk(job: Job[Delay]) -> None:
        seen.append((job.data, await delays.sequence_of(job.id)))

    await app.subscribe(at_jfk)
    await delays.publish(Delay("LAX", 3))
    await delays.publish(Delay("JFK", 12.5))
    (record,) = await run_due_jobs(app)
    assert seen == [(Delay("JFK", 12.5), 2)]
    assert record.data == {"dest": "JFK", "minutes": 12.5}
    assert (await app.find(record.id)).status is Status.SUCCEEDED
    copy = await app.replay(record.id)
    assert (await app.find(copy.id)).data == {"dest": "JFK", "minutes": 12.5}
    with pytest.raises(InvalidInput):
        await delays.publish({"dest": 5})  # type: ignore[arg-type]


async def test_messages_are_pruned_when_nothing_refers_to_them(app: Penstock, sql: Sql) -> None:
    memos = app.topic("memos", catch_up=1)
    await memos.subscribe("bob")
    for n in range(4):
        await memos.publish(n)
    rows = await sql.fetch("select id, attempt, lease from penstock.claim('w', '{memos_bob}', 2)")
    await sql.execute(
        "select penstock.settle($1::uuid[], $2::smallint[], $3::bigint[])", *([row[i] for row in rows] for i in range(3))
    )
    database = await app.database()
    assert await sql_topics.prune_messages(database, timedelta(0)) == 0  # two are archived, two are queued
    await sql.execute("delete from penstock.archived_jobs")
    assert await sql_topics.prune_messages(database, timedelta(days=1)) == 0
    assert await sql_topics.prune_messages(database, timedelta(0)) == 2
    await sql.execute("delete from penstock.queued_jobs")
    assert await sql_topics.prune_messages(database, timedelta(0)) == 1
    assert [m.data for m in await memos.read(3)] == [3]


async def test_a_reader_does_not_continue_over_a_gap(app: Penstock, sql: Sql) -> None:
    memos = app.topic("memos")
    for n in range(5):
        if n in (1, 3):
            await memos.subscribe("away")
        await memos.publish(n)
        if n in (1, 3):
            await memos.unsubscribe("away")
    database = await app.database()
    assert await sql_topics.prune_messages(database, timedelta(0)) == 3
    # 2 and 4 wait in a queue, and stay; 5 is gone.
    assert [m.seq for m in await memos.read()] == [2, 4]
    for gap in (0, 2, 4):
        with pytest.raises(Conflict, match=f"after {gap} are gone") as refused:
            await memos.read(gap)
        assert "All after 5" in refused.value.hint
        with pytest.raises(Conflict):
            await memos.subscribe("new", since=gap)
    await memos.publish("six")
    assert [m.data for m in await memos.read(5)] == ["six"]
    assert (await memos.subscribe("new", since=5)).replayed == 1


async def test_messages_that_stay_do_not_keep_others_from_being_pruned(app: Penstock, sql: Sql) -> None:
    dead, lively = app.topic("dead"), app.topic("lively")
    await dead.subscribe("nobody")
    await dead.publish_many(range(5))
    await lively.publish_many(range(5))
    assert await sql.fetchval("select penstock.prune_messages(interval '0', 3)") == 3
    assert await sql.fetchval("select penstock.prune_messages(interval '0', 3)") == 2
    assert await sql.fetchval("select penstock.prune_messages(interval '0', 3)") == 0
    assert len(await dead.read()) == 5


async def test_a_topic_that_is_in_use_is_pruned_another_time(app: Penstock, memos: Topic[Any], url: str, sql: Sql) -> None:
    await memos.publish_many(range(3))
    joining = await asyncpg.connect(url)
    async with joining.transaction():
        assert await joining.fetchval("select replayed from penstock.subscribe('memos', 'late', p_since => 0)") == 3
        assert await sql.fetchval("select penstock.prune_messages(interval '0')") == 0
    await joining.close()
    assert await sql.fetchval("select penstock.prune_messages(interval '0')") == 0
    assert await copies(app, "memos_late") == [0, 1, 2]


async def test_who_comes_back_gets_what_waits_and_what_was_missed_once(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    await memos.subscribe("bob")
    await memos.publish_many(["one", "two"])
    await memos.unsubscribe("bob")
    await memos.publish("three")
    again = await memos.subscribe("bob", since=0)
    assert (again.created, again.replayed) == (True, 1)
    assert await copies(app, "memos_bob") == ["one", "two", "three"]


async def test_what_was_dropped_does_not_come_back(app: Penstock, memos: Topic[Any], sql: Sql) -> None:
    await memos.subscribe("bob")
    await memos.publish("dropped")
    await memos.unsubscribe("bob", drop=True)
    assert await sql.fetchval("select status from penstock.archived_jobs") == "expired"
    await memos.subscribe("bob")
    await memos.publish("new")
    assert await copies(app, "memos_bob") == ["new"]


async def test_a_change_of_the_list_is_noticed(app: Penstock, memos: Topic[Any], url: str, sql: Sql) -> None:
    assert await memos.subscribers() == []
    notified: list[Any] = []
    await sql.add_listener(sql_topics.CHANNEL, lambda *heard: notified.append(heard[-1]))
    other = Penstock(url)
    await other.topic("memos").subscribe("bob", filter={"n": 1})
    assert [(s.client_id, s.filter) for s in await memos.subscribers()] == [("bob", {"n": 1})]
    assert await memos.subscribers() is await memos.subscribers()
    await eventually(lambda: notified == ["memos"], "the notification")
    await other.topic("memos").unsubscribe("bob")
    assert await memos.subscribers() == []
    await other.close()


async def test_what_was_handed_out_is_missed_and_what_waits_is_not(sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("select penstock.declare_topic('t')")
    await sql.execute("select penstock.subscribe('t', 'a', p_filter => '{\"n\": 1}')")
    for data in ('{"n": 1}', '{"n": 2}', '{"n": 1, "m": 3}', '{"n": 1, "m": 4}'):
        await sql.execute("select penstock.publish('t', $1::jsonb)", data)
    await sql.execute("select penstock.publish('t', '{\"n\": 1}', p_unique_key => 'u')")
    await sql.execute("select penstock.publish('t', '{\"n\": 1}', p_unique_key => 'u')")
    for row in await sql.fetch("select id, attempt, lease from penstock.claim('w', array['t_a'], 2)"):
        await sql.execute("select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])", *row)
    missed = "select seq from penstock.missed_messages('t', 'a', $1)"
    assert [row["seq"] for row in await sql.fetch(missed, 0)] == [1, 3]
    assert [row["seq"] for row in await sql.fetch(missed, 1)] == [3]
    for wrong in ("penstock.missed_messages('t', 'b', 0)", "penstock.missed_messages('none', 'a', 0)"):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await sql.fetch(f"select * from {wrong}")
        assert refused.value.sqlstate == "PS404"
