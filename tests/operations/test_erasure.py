"""Erasure: afterwards no table and no file of the database has anything of the person, and the neighbour has lost nothing."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from penstock import (
    Backoff,
    Conflict,
    Erasure,
    Event,
    Fail,
    InvalidInput,
    Job,
    JobFilter,
    NewEvent,
    NewJob,
    NotFound,
    OperationRecord,
    Penstock,
    RateLimit,
)
from penstock.core.encryption import new_key
from penstock.operations import queries
from penstock.operations.vacuuming import vacuum_erased
from penstock.testing import consumed, run_due_jobs, running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
MINUTE = timedelta(minutes=1)
PERSON, NEIGHBOUR = "anna-7f3c91", "bert-20aa55"
BY = {"key": Erasure(key=PERSON, rewrite=True), "field": Erasure(field="customer.id", value=PERSON, rewrite=True)}


async def erased(app: Penstock, id: UUID, limit: int = 1_000) -> OperationRecord:
    """Do an erasure to its end, as maintenance does."""
    database = await app.database()

    async def ended() -> bool:
        while await queries.advance(database, limit) is not None:
            pass
        await vacuum_erased(database)
        return (await app.operations.find(id)).ended

    await eventually(ended, "the end of the erasure")
    return await app.operations.find(id)


async def tables(sql: Sql) -> dict[str, bytes]:
    """All tables of the schema, as COPY has them."""
    names = await sql.fetch(
        "select relname from pg_class where relnamespace = 'penstock'::regnamespace and relkind = 'r' order by relname"
    )
    found = {}
    for row in names:
        content = io.BytesIO()
        await sql.copy_from_query(f'select * from penstock."{row[0]}"', output=content)
        found[row[0]] = content.getvalue()
    return found


async def tables_with(sql: Sql, person: str) -> list[str]:
    """The tables in which a person is found, as text or in bytes."""
    needles = (person.encode(), person.encode().hex().encode())
    return [name for name, content in (await tables(sql)).items() if any(needle in content for needle in needles)]


async def files_with(sql: Sql, person: str) -> list[str]:
    """What the files of the database are for in which a person is found, after a checkpoint."""
    await sql.execute("checkpoint")
    folder, base = await sql.fetchrow(
        "select current_setting('data_directory'), 'base/' || oid from pg_database where datname = current_database()"
    )
    of = {
        row[0]: row[1]
        for row in await sql.fetch(
            "select pg_relation_filepath(oid), oid::regclass::text from pg_class where relfilenode > 0 or relkind = 'r'"
        )
    }
    found = []
    for file in sorted(Path(folder, base).iterdir()):
        if file.is_file() and person.encode() in file.read_bytes():
            found.append(of.get(f"{base}/{file.name}", file.name))
    return found


async def rows_of(sql: Sql, person: str) -> dict[str, list[str]]:
    """The rows of a person, by table, without those of streams, whose rows have events of several."""
    found = {}
    for name in await tables(sql):
        if not name.startswith("events_"):
            rows = await sql.fetch(
                f'select stored::text from penstock."{name}" as stored where stored::text like $1 order by 1', f"%{person}%"
            )
            if rows:
                found[name] = [row[0] for row in rows]
    return found


async def events_of(sql: Sql, stream: str) -> list[tuple[Any, ...]]:
    """All events of a stream: partition, offset, key, payload."""
    partitions = await sql.fetch("select partition, first_offset, next_offset from penstock.stream_bounds($1)", stream)
    return [
        (partition, row["event_offset"], row["key"], row["data"], row["headers"])
        for partition, first, end in partitions
        if end > first
        for row in await sql.fetch(
            "select event_offset, key, data::text, headers::text from penstock.read_events($1, $2, $3, 100000)",
            stream,
            partition,
            first,
        )
    ]


def of(person: str, n: int = 0) -> dict[str, Any]:
    """A payload of a person."""
    return {"customer": {"id": person}, "n": n}


@asynccontextmanager
async def town(url: str, sql: Sql) -> AsyncIterator[Penstock]:
    """An app with something of each kind, of the person and of the neighbour."""
    app = Penstock(url)

    @app.job("mail", max_attempts=2, keep_result=True, backoff=Backoff(base=timedelta(hours=1)))
    async def mail(job: Job[dict[str, Any]]) -> dict[str, Any]:
        who = job.data["customer"]["id"]
        job.log(f"a mail to {who}")
        job.progress({"to": who})
        if job.data["n"] % 3 == 0:
            raise ValueError(f"{who} has moved")
        if job.data["n"] % 3 == 1:
            raise Fail(f"{who} is unknown")
        return {"sent_to": who}

    @app.job("receipt", keep=timedelta(days=90))
    async def receipt(job: Job[dict[str, Any]]) -> None:
        pass

    ledger = app.pool("ledger", payload=dict[str, Any], key_rate=RateLimit(1000, timedelta(hours=1)))
    orders = app.stream("orders", dict[str, Any], partitions=3, segment_events=20)
    letters = app.stream("orders.dead", dict[str, Any])
    news = app.topic("news")
    async with app:
        await app.create_job_type("waiting")
        for person in (PERSON, NEIGHBOUR):
            await app.enqueue_many("mail", [NewJob(of(person, n), key=person) for n in range(6)])
            await app.enqueue_many("receipt", [NewJob(of(person, n), key=person) for n in range(3)])
        await run_due_jobs(app, "mail", "receipt")
        for person in (PERSON, NEIGHBOUR):
            await app.enqueue_many("waiting", [NewJob(of(person, n), key=person) for n in range(5)])
            await app.enqueue("waiting", of(person), key=person, run_after=timedelta(hours=1))
            await app.enqueue("waiting", of(person), key=person, unique=f"{person}/1", unique_for=timedelta(hours=1))
            await ledger.declare()
            await ledger.enqueue(person, of(person))
            await ledger.set_weight(person, 3)
            await ledger.pause_key(person)
            await ledger.start(person, of(person))
            await sql.execute("insert into penstock.rate_windows values ('ledger', $1, now() + interval '1 hour', 1)", person)
        await news.subscribe("reader")
        for person in (PERSON, NEIGHBOUR):
            await news.publish(of(person), key=person)
        await letters.declare()
        for start in range(0, 60, 10):
            await orders.append_many(
                [
                    NewEvent(of(person, n), person, headers={"for": person})
                    for n in range(start, start + 10)
                    for person in (PERSON, NEIGHBOUR)
                ]
            )
            await sql.execute("select penstock.maintain_stream('orders')")
        await letters.append_many(
            [NewEvent(of(person), person, headers={"dead": {"error": person}}) for person in (PERSON, NEIGHBOUR)]
        )
        # Statistics of columns quote their values.
        await sql.execute("analyze")
        yield app


@pytest.mark.parametrize("by", ["key", "field"])
async def test_nothing_of_the_person_is_found_and_everything_of_the_neighbour_is(url: str, sql: Sql, by: str) -> None:
    async with town(url, sql) as app:
        if by == "field":
            # What has the key, and no payload, is the matter of the other erasure.
            await sql.execute("delete from penstock.unique_periods; delete from penstock.key_weights")
        mine, orders = await rows_of(sql, NEIGHBOUR), await events_of(sql, "orders")
        assert len(await tables_with(sql, PERSON)) > 8, "the test has too little to erase"
        assert len(await files_with(sql, PERSON)) > 8
        preview = await app.operations.preview_erasure(BY[by])
        # Of six mails one in three waits for its retry.
        expected = (11, 7)
        assert (preview.queued, preview.archived, preview.events, preview.standing, preview.unseen) == (*expected, 61, 1, 0)
        assert preview.messages == 1
        started = await app.operations.erase(BY[by])
        assert (started.kind, started.state, started.phase) == ("erase", "running", "queue")
        # Several small steps, so that operations go on where they were.
        record = await erased(app, started.id, limit=3)
        assert record.state == "finished" and record.counts is not None
        assert (record.counts["queued"], record.counts["archived"], record.counts["events"]) == (*expected, 61)
        assert record.counts["standing"] == 1
        assert record.filter == {"rewrite": True} | ({"field": "customer.id"} if by == "field" else {})
        assert await tables_with(sql, PERSON) == []
        assert await rows_of(sql, NEIGHBOUR) == mine
        after = await events_of(sql, "orders")
        assert [event for event in after if event[2] == NEIGHBOUR] == [event for event in orders if event[2] == NEIGHBOUR]
        # Offsets stay dense: the person's events are marks.
        assert [event[:2] for event in after] == [event[:2] for event in orders]
        assert all("erased" in event[4] and event[3] is None for event in after if event[2] != NEIGHBOUR)
        if by == "field":
            assert await files_with(sql, PERSON) == []


async def test_no_file_of_the_database_has_a_key_that_was_erased(url: str, sql: Sql) -> None:
    async with town(url, sql) as app:
        started = await app.operations.erase(BY["key"])
        await erased(app, started.id)
        assert await files_with(sql, PERSON) == []
        assert await files_with(sql, NEIGHBOUR) != []


async def test_running_jobs_are_cancelled_and_erased_by_the_workers_themselves(url: str, sql: Sql) -> None:
    app = Penstock(url)
    running: set[str] = set()

    @app.job("mail")
    async def mail(job: Job[str]) -> None:
        running.add(job.data)
        if job.data == PERSON:
            await asyncio.Event().wait()

    async with app:
        await app.enqueue_many("mail", [NewJob(PERSON, key=PERSON), NewJob(NEIGHBOUR, key=NEIGHBOUR)])
        async with running_worker(app, at_once=True):
            await eventually(lambda: len(running) == 2, "the start of both")
            started = await app.operations.erase(Erasure(key=PERSON))
            record = await app.operations.wait(started.id, timeout=MINUTE)
            assert (record.state, record.counts) == ("finished", {"archived": 1})
        assert await tables_with(sql, PERSON) == []
        assert [job.data for job in await app.find_many(name="mail")] == [NEIGHBOUR]


async def test_readers_and_consumer_groups_continue_through_what_was_erased(url: str, sql: Sql) -> None:
    app = Penstock(url)
    orders = app.stream("orders", int, partitions=1, segment_events=10)
    seen: list[tuple[int, int]] = []

    @orders.consumer(group="billing", max_batch_size=3)
    async def bill(event: Event[int]) -> None:
        seen.append((event.offset, event.data))

    async with app:
        await orders.append_many([NewEvent(n, PERSON if n % 4 == 1 or 40 <= n < 60 else NEIGHBOUR) for n in range(100)])
        started = await app.operations.erase(Erasure(key=PERSON))
        await erased(app, started.id)
        await orders.append_many([NewEvent(n, PERSON) for n in range(100, 105)])
        kept = [n for n in range(105) if n >= 100 or not (n % 4 == 1 or 40 <= n < 60)]
        async with running_worker(app):
            await consumed(orders, "billing")
        # What was appended later is not erased, under offsets that go on.
        assert seen == [(n, n) for n in kept]
        read = await orders.read(0, limit=200)
        assert [event.offset for event in read] == list(range(105))
        assert [event.data for event in read if "erased" not in event.headers] == kept
        assert {event.key for event in read if "erased" in event.headers} == {None}
        assert [(lag.next, lag.lag) for lag in await orders.lag("billing")] == [(105, 0)]


async def test_a_mark_is_no_dead_letter_and_is_not_replayed(url: str, sql: Sql) -> None:
    app = Penstock(url)
    orders = app.stream("orders", int, partitions=1)
    letters = app.stream("orders.dead", int)
    async with app:
        await orders.declare()
        await letters.declare()
        await letters.append_many(
            [NewEvent(n, PERSON if n % 2 else NEIGHBOUR, headers={"dead": {"group": "billing"}}) for n in range(6)]
        )
        started = await app.operations.erase(Erasure(key=PERSON))
        await erased(app, started.id)
        # Also when all that a call would read are marks.
        assert [await orders.replay_dead(limit=1) for _ in range(4)] == [1, 1, 1, 0]
        assert [event[2] for event in await events_of(sql, "orders")] == [NEIGHBOUR] * 3


async def test_payloads_that_cannot_be_seen_are_named_unless_they_are_skipped(url: str, sql: Sql) -> None:
    app = Penstock(url)
    pictures = app.stream("pictures", bytes, partitions=1, compression="zstd")
    async with app:
        await pictures.append(PERSON.encode(), key=PERSON)
        with pytest.raises(Conflict, match="stream pictures"):
            await app.operations.erase(Erasure(field="customer.id", value=PERSON))
        skipped = await app.operations.erase(Erasure(field="customer.id", value=PERSON, skip_unseen=True))
        assert (await erased(app, skipped.id)).counts == {}
        by_key = await app.operations.erase(Erasure(key=PERSON))
        assert (await erased(app, by_key.id)).counts == {"events": 1}
        assert await tables_with(sql, PERSON) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (Erasure(), "either a key, or a field with its value"),
        (Erasure(key="a", field="b", value="c"), "either a key, or a field"),
        (Erasure(field="b"), "either a key, or a field"),
        (Erasure(key="a", job=uuid4()), "either a key, or a field"),
        (Erasure(job="seven"), "invalid id of a job: seven"),
        (Erasure(key=""), "is empty"),
        (Erasure(field="customer..id", value="c"), "is empty"),
    ],
)
async def test_an_erasure_of_nothing_or_of_everything_is_refused(app: Penstock, wrong: Erasure, problem: str) -> None:
    for call in (app.operations.erase, app.operations.preview_erasure):
        with pytest.raises(InvalidInput, match=problem):
            await call(wrong)


async def test_the_same_id_is_the_same_erasure_also_when_it_has_forgotten_whose(app: Penstock) -> None:
    id = uuid4()
    first = await app.operations.erase(Erasure(key=PERSON), id=id)
    assert await app.operations.erase(Erasure(key=PERSON), id=id) == first
    with pytest.raises(Conflict, match="is another one"):
        await app.operations.erase(Erasure(key=NEIGHBOUR), id=id)
    ended = await erased(app, id)
    assert await app.operations.erase(Erasure(key=PERSON), id=id) == ended


async def test_what_an_open_transaction_has_enqueued_before_the_start_is_erased(app: Penstock, sql: Sql, url: str) -> None:
    await app.create_job_type("mail")
    database = await app.database()
    async with sql.transaction():
        await sql.execute("select penstock.enqueue('mail', to_jsonb($1::text), p_key => $1)", PERSON)
        started = await app.operations.erase(Erasure(key=PERSON))
        late = await app.enqueue("mail", PERSON, key=PERSON)
        for _ in range(3):
            await queries.advance(database)
        record = await app.operations.find(started.id)
        assert (record.phase, record.postponed > 0) == ("queue", True)
    assert (await erased(app, started.id)).counts == {"queued": 1}
    # What is enqueued after the start is not part of it.
    assert (await app.find(late.id)).key == PERSON


async def test_an_erasure_waits_for_a_snapshot_that_still_sees_the_rows(app: Penstock, sql: Sql, url: str) -> None:
    await app.create_job_type("mail")
    await app.enqueue("mail", PERSON, key=PERSON)
    database = await app.database()
    async with sql.transaction(isolation="repeatable_read"):
        await sql.fetchval("select count(*) from penstock.queued_jobs")
        started = await app.operations.erase(Erasure(key=PERSON))

        async def in_its_last_phase() -> bool:
            await queries.advance(database)
            return (await app.operations.find(started.id)).phase == "vacuum"

        await eventually(in_its_last_phase)
        assert await vacuum_erased(database) is None
        assert not (await app.operations.find(started.id)).ended
    assert (await erased(app, started.id)).state == "finished"


async def test_a_cancelled_erasure_does_not_say_whose_it_was(app: Penstock, sql: Sql) -> None:
    started = await app.operations.erase(Erasure(key=PERSON))
    assert (await app.operations.cancel(started.id)).filter == {}
    assert await tables_with(sql, PERSON) == []


async def test_an_erasure_is_not_ended_as_another_operation(app: Penstock, sql: Sql) -> None:
    started = await app.operations.erase(Erasure(key=PERSON))
    with pytest.raises(asyncpg.PostgresError, match="is an erasure") as refused:
        await sql.execute("select penstock.cancel_operation($1)", started.id)
    assert refused.value.sqlstate == "PS409"
    assert not (await app.operations.find(started.id)).ended
    other = await app.operations.start("cancel", JobFilter(key="somebody else"))
    with pytest.raises(asyncpg.PostgresError, match="no such erasure"):
        await sql.execute("select penstock.cancel_erasure($1)", other.id)
    assert (await sql.fetchrow("select * from penstock.cancel_erasure($1)", started.id))["state"] == "cancelled"
    # One that has ended stays as it is, for both.
    assert (await sql.fetchrow("select * from penstock.cancel_operation($1)", started.id))["state"] == "cancelled"


async def test_other_operations_on_the_key_forget_it(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    cancelled = await app.operations.start("cancel", JobFilter(name="mail", key=PERSON))
    started = await app.operations.erase(Erasure(key=PERSON))
    await erased(app, started.id)
    assert (await app.operations.find(cancelled.id)).filter == {"name": "mail"}
    assert await tables_with(sql, PERSON) == []


@pytest.mark.parametrize("person", [PERSON, 'The "Acme" \\ Company', "4711"])
async def test_the_audit_keeps_who_and_what_and_forgets_the_key(app: Penstock, sql: Sql, person: str) -> None:
    to = json.dumps({"name": "mail", "key": person, "where": [{"customer.id": person}]})
    for filter, error in ((to, None), (json.dumps({"name": "mail", "key": "another"}), f"no job of {person}.")):
        change = await sql.fetchval("select penstock.begin_change('ann', 'cancel', $1)", filter)
        await sql.execute("select penstock.end_change($1, 1, $2)", change, error)
    started = await app.operations.erase(Erasure(key=person))
    await erased(app, started.id)
    kept = await sql.fetch("select user_name, action, filter, changed, error from penstock.changes order by id")
    assert [(row[0], row[1], json.loads(row[2]), row[3], row[4]) for row in kept] == [
        ("ann", "cancel", {"erased": True}, 1, None),
        ("ann", "cancel", {"name": "mail", "key": "another"}, 1, "erased"),
    ]


async def test_one_job_of_an_encrypted_type_is_erased_by_its_id_and_not_by_a_field(url: str, sql: Sql) -> None:
    app = Penstock(url, keys=[new_key()])
    letters = app.job_type("letters", encrypted=True)
    async with app:
        await letters.declare()
        ours, other = [job.id for job in await letters.enqueue_many([NewJob(of(PERSON, n), key=PERSON) for n in range(2)])]
        with pytest.raises(Conflict, match="job type letters"):
            await app.operations.erase(Erasure(field="customer.id", value=PERSON))
        started = await app.operations.erase(Erasure(job=ours))
        record = await erased(app, started.id)
        assert (record.counts, record.filter) == ({"queued": 1}, {})
        with pytest.raises(NotFound):
            await app.find(ours)
        assert (await app.find(other)).data == of(PERSON, 1)
        by_key = await app.operations.erase(Erasure(key=PERSON))
        assert (await erased(app, by_key.id)).counts == {"queued": 1}
        assert await tables_with(sql, PERSON) == []


async def test_a_key_of_a_pool_with_its_own_assign_loses_its_slot(url: str, sql: Sql) -> None:
    app = Penstock(url)
    pool = app.pool("routes", payload=int, assign=lambda key, workers: 0)
    async with app:
        await pool.declare()
        for person in (PERSON, NEIGHBOUR):
            await pool.enqueue(person, 1)
        await sql.execute("update penstock.slots set error = key || ' has no route', failed_at = now()")
        started = await app.operations.erase(Erasure(key=PERSON))
        assert (await erased(app, started.id)).counts == {"queued": 1, "rows": 1}
        assert await tables_with(sql, PERSON) == []
        rows = await sql.fetch("select key, error from penstock.slots")
        assert [tuple(row) for row in rows] == [(NEIGHBOUR, f"{NEIGHBOUR} has no route")]


async def test_a_job_that_was_erased_is_not_found(app: Penstock) -> None:
    await app.create_job_type("mail")
    receipt = await app.enqueue("mail", of(PERSON))
    started = await app.operations.erase(Erasure(field="customer.id", value=PERSON))
    await erased(app, started.id)
    with pytest.raises(NotFound):
        await app.find(receipt.id)


@pytest.mark.parametrize(
    "odd",
    [
        r'{"who": "anna-7f3c91", "note": "\u0000"}',
        r'{"note": "\\\ud83d\\\ude00", "who": "anna-7f3c91"}',
        r'{"note": "\ude00\ud83d\ud83d\ude00", "who": "anna-7f3c91"}',
        r'{"note": 1e9999999, "who": "anna-7f3c91"}',
    ],
)
async def test_events_that_postgresql_cannot_read_stop_no_erasure_by_a_field_and_are_erased(url: str, sql: Sql, odd: str) -> None:
    app = Penstock(url)
    orders = app.stream("orders", partitions=1)
    async with app:
        await orders.declare()
        await sql.execute("select penstock.append('orders', $1::json)", odd.replace(PERSON, NEIGHBOUR))
        await sql.execute("select penstock.append('orders', $1::json)", odd)
        # What a role stages may be anything.
        await sql.execute(
            "insert into penstock.staged_jobs (writer, part, place, name, data) values ('w', 'p', 1, 'mail', 'no JSON')"
        )
        who = Erasure(field="who", value=PERSON)
        assert (await app.operations.preview_erasure(who)).events == 1
        record = await erased(app, (await app.operations.erase(who)).id)
        assert record.state == "finished" and record.counts is not None and record.counts["events"] == 1
        assert await tables_with(sql, PERSON) == []
        kept, mark = await sql.fetch("select data::text, headers::text from penstock.read_events('orders', 0, 0, 10)")
        assert kept["data"] == odd.replace(PERSON, NEIGHBOUR)
        assert mark["data"] is None and "erased" in mark["headers"]
