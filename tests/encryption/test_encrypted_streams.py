"""Encrypted streams: what is stored, who may append, who may consume, and what happens without a key."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Batch, Event, NewEvent, OnFailure, Penstock, Stream
from penstock.core.encryption import is_envelope, is_sealed, key_id_of, new_key
from penstock.errors import Conflict, InvalidInput, Unreadable
from penstock.testing import running_worker
from penstock.worker.fleets import workers
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
WORD = "quokka"
NOW = timedelta(seconds=0.2)


@pytest.fixture
def keys() -> list[str]:
    return [new_key()]


def declared(url: str, keys: list[str], **options: Any) -> tuple[Penstock, Stream[Any]]:
    """An application and its stream."""
    app = Penstock(url, keys=keys)
    return app, app.stream("orders", **{"partitions": 2, "encrypted": True, **options})


async def stored(sql: Sql) -> str:
    """All that the tables of the schema have, as text; bytes that are the word, as the word."""
    found = []
    for (name,) in await sql.fetch("select table_name from information_schema.tables where table_schema = 'penstock'"):
        found += [row[0] for row in await sql.fetch(f'select t::text from penstock."{name}" as t')]
    return "\n".join(found).replace(WORD.encode().hex(), WORD)


async def payloads(sql: Sql, column: str = "data") -> list[Any]:
    """The stored payloads of all streams."""
    found: list[Any] = []
    for (table,) in await sql.fetch("select table_name from penstock.segments order by id"):
        for row in await sql.fetch(f'select {column} from penstock."{table}" order by partition, first_offset'):
            found += row[0] or []
    return found


async def read(stream: Stream[Any]) -> list[Event[Any]]:
    async with stream.tail("earliest", idle_timeout=NOW) as reader:
        return [event async for event in reader]


async def test_payloads_lie_encrypted_beside_readable_keys_and_are_read_with_the_key(url: str, sql: Sql, keys: list[str]) -> None:
    app, orders = declared(url, keys, key="customer", key_optional=True)
    async with app:
        await orders.append({"customer": "acme", "word": WORD}, headers={"trace": "t1"})
        await orders.append_many([NewEvent({"word": WORD}, key="acme"), {"customer": "acme", "n": 3}])
        await orders.load([{"customer": "acme", "n": n, "word": WORD} for n in range(4)])
        async with asyncpg_transaction(url) as connection:
            await orders.append({"customer": "acme", "word": WORD}, connection=connection)
        assert WORD not in await stored(sql)
        assert {key_id_of(text) for text in await payloads(sql)} == set(app.context.keyring.ids)
        found = await read(orders)
        assert len(found) == 8 and {event.key for event in found} == {"acme"}
        assert found[0].data == {"customer": "acme", "word": WORD} and found[0].headers == {"trace": "t1"}
        assert [event.data for event in await orders.read(found[0].partition)] == [event.data for event in found]


def asyncpg_transaction(url: str) -> Any:
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def opened() -> Any:
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                yield connection
        finally:
            await connection.close()

    return opened()


@pytest.mark.parametrize(("payload", "options"), [(bytes, {}), (bytes, {"compression": "zstd"}), (dict, {"compression": "zstd"})])
async def test_streams_of_bytes_are_encrypted_after_they_are_compressed(
    url: str, sql: Sql, keys: list[str], payload: Any, options: dict[str, Any]
) -> None:
    app = Penstock(url, keys=keys)
    orders = app.stream("orders", payload, partitions=1, encrypted=True, **options)
    given = [WORD.encode() * 100, b"", b"x"] if payload is bytes else [{"word": WORD * 100}, {}, {"n": 1}]
    async with app:
        await orders.append_many(given)
        assert WORD not in await stored(sql)
        found = await payloads(sql, "bytes")
        assert all(is_sealed(one) for one in found)
        if options:
            assert len(found[0]) < 300, "it was compressed before"
        assert [event.data for event in await read(orders)] == given
        # A reader without the key is told so; one by name reads with it.
        async with Penstock(url, keys=keys) as other:
            assert [event.data for event in await read(await other.find_stream("orders", payload))] == given
        async with Penstock(url) as keyless:
            with pytest.raises(Unreadable, match="encrypted with the key"):
                await (await keyless.find_stream("orders", payload)).read(0)


PLAIN_WRITES = [
    "select penstock.append('orders', '{\"card\": 1}')",
    "select penstock.append_many('orders', array['{\"card\": 1}']::json[])",
    "select penstock.append_json('orders', '[{\"data\": {\"card\": 1}}]')",
    "select penstock.append_each_json('orders', '[{\"data\": null, \"key\": \"k\"}]')",
    'select penstock.append(\'orders\', \'{"penstock": {"v": 1, "kid": "a", "c": "the words themselves"}}\')',
    "select penstock.append_routed('orders', 2, '{0}', '{1}', array['1']::json[])",
    "insert into penstock.loaded_chunks (stream, partition, events, data) values ('orders', 0, 1, array['1']::json[])",
    "insert into penstock.staged_events (writer, part, place, stream, width, partition, events, data)"
    " values ('w', '1.a.b', 0, 'orders', 2, 0, 1, array['1'])",
    "insert into penstock.staged_events (writer, part, place, stream, width, partition, events, data)"
    " values ('w', '1.a.b', 0, 'orders', 2, 0, 1, array['no json'])",
]  # fmt: skip


@pytest.mark.parametrize("statement", PLAIN_WRITES)
async def test_a_producer_without_a_key_is_refused_with_the_reason(url: str, sql: Sql, keys: list[str], statement: str) -> None:
    app, orders = declared(url, keys)
    async with app:
        await orders.declare()
        with pytest.raises(asyncpg.PostgresError, match="stream orders is encrypted, and event 1 of 1 is not") as refused:
            await sql.execute(statement)
        assert refused.value.sqlstate == "PS400"
        assert await payloads(sql) == []
        assert await sql.fetchval("select count(*) from penstock.staged_events") == 0


async def test_an_application_without_a_key_or_with_an_older_declaration_is_refused(url: str, keys: list[str]) -> None:
    app, orders = declared(url, keys)
    async with app:
        await orders.declare()
        keyless, its = declared(url, [])
        async with keyless:
            with pytest.raises(InvalidInput, match="stream orders is encrypted, and this application has no key"):
                await its.append({"n": 1})
        older, its = declared(url, keys, encrypted=False)
        async with older:
            with pytest.raises(InvalidInput, match="stream orders is encrypted, and event 1 of 1 is not") as refused:
                await its.append({"n": 1})
            assert "encrypted=True" in str(refused.value)
            assert (await its.declare()).encrypted, "a declaration never turns encryption off"


async def test_turning_encryption_on_and_off_leaves_no_event_behind(url: str, sql: Sql, keys: list[str]) -> None:
    before, orders = declared(url, keys, encrypted=False, partitions=1)
    async with before:
        await orders.append({"n": 1})
    app, orders = declared(url, keys, partitions=1)
    async with app:
        await orders.append({"n": 2})
        await orders.change(encrypted=False)
        await sql.execute("select penstock.append('orders', '{\"n\": 3}')")
        assert [event.data["n"] for event in await read(orders)] == [1, 2, 3]
    async with before:
        # An application that does not declare it so reads both forms with the keys too.
        assert [event.data["n"] for event in await before.streams["orders"].read(0)] == [1, 2, 3]


async def test_what_only_looks_encrypted_is_what_it_is(url: str) -> None:
    """A stream that never was encrypted has no envelopes."""
    lookalike = {"penstock": {"v": 1, "kid": "AAAAAAAA", "c": "A" * 40}}
    app, orders = declared(url, [new_key()], encrypted=False)
    async with app:
        await orders.append(lookalike)
        assert [event.data for event in await read(orders)] == [lookalike]


async def test_old_events_are_read_and_new_ones_written_with_the_new_key(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()
    app, orders = declared(url, [old], partitions=1)
    async with app:
        await orders.append({"n": 1})
    app, orders = declared(url, [new, old], partitions=1)
    async with app:
        await orders.append({"n": 2})
        assert [key_id_of(text) for text in await payloads(sql)] == [app.context.keyring.ids[1], app.context.keyring.ids[0]]
        assert [event.data["n"] for event in await read(orders)] == [1, 2]


async def test_an_event_that_was_moved_to_another_stream_does_not_open(url: str, sql: Sql, keys: list[str]) -> None:
    app, orders = declared(url, keys)
    refunds = app.stream("refunds", partitions=1, encrypted=True)
    async with app:
        await orders.append({"n": 1})
        await refunds.declare()
        (text,) = await payloads(sql)
        await sql.execute("select penstock.append('refunds', $1)", text)
        with pytest.raises(Unreadable, match="belongs to something else"):
            await refunds.read(0)


async def test_a_batch_of_a_producer_that_is_sent_again_is_appended_once(url: str, sql: Sql, keys: list[str]) -> None:
    app, orders = declared(url, keys)
    async with app:
        first, again = orders.producer("importer"), orders.producer("importer", sequence=0)
        batch = [{"n": n, "word": WORD} for n in range(5)]
        positions = list(await first.append_many(batch))
        assert list(await again.append_many(batch)) == positions
        other = orders.producer("importer", sequence=0)
        with pytest.raises(Conflict, match="was another one"):
            await other.append_many([{"n": 9}])
        await first.append({"n": 6})
        assert sorted(event.data["n"] for event in await read(orders)) == [0, 1, 2, 3, 4, 6]
        assert WORD not in await stored(sql)


async def test_compaction_keeps_the_last_event_of_each_key_and_deletions(url: str, sql: Sql, keys: list[str]) -> None:
    app, orders = declared(url, keys, partitions=1, compact=True, tombstone_age=timedelta(0))
    async with app:
        await orders.append_many([NewEvent({"n": n, "word": WORD}, key=f"k{n % 3}") for n in range(9)])
        await orders.append(None, key="k0")
        await sql.execute("select penstock.roll_segment('orders')")
        await orders.append({"n": 99}, key="later")
        for _ in range(3):
            await sql.execute("select penstock.compact_stream('orders')")
        found = await read(orders)
        assert [(event.key, event.data and event.data["n"]) for event in found if event.data] == [
            ("k1", 7), ("k2", 8), ("later", 99),
        ]  # fmt: skip
        assert WORD not in await stored(sql)


async def test_a_consumer_gets_what_was_appended_and_its_failures_lie_encrypted(url: str, sql: Sql, keys: list[str]) -> None:
    app, orders = declared(url, keys, partitions=1)
    seen: list[Any] = []

    @orders.consumer(group="billing", on_failure=OnFailure(max_attempts=1, then="dead-letter"))
    async def bill(event: Event[Any]) -> None:
        seen.append(event.data)
        if event.data.get("fail"):
            raise ValueError(f"no such card: {WORD}")

    @orders.consumer(group="audit", on_failure=OnFailure(max_attempts=1, then="quarantine"))
    async def audit(event: Event[Any]) -> None:
        if event.data.get("fail"):
            raise LookupError(f"not known: {WORD}")

    async with app:
        await orders.append_many([{"n": 1, "word": WORD}, {"fail": True}, {"n": 3}])
        async with running_worker(app):
            await eventually(lambda: lagging(orders, "billing"), "the events")
            (lag,) = await eventually(lambda: paused(orders, "audit"), "the quarantine")
        assert seen == [{"n": 1, "word": WORD}, {"fail": True}, {"n": 3}]
        assert WORD not in await stored(sql)
        assert lag.pause_reason == f"offset 1: LookupError: not known: {WORD}"
        async with Penstock(url) as keyless:
            (lag,) = await (await keyless.find_stream("orders")).lag("audit")
            assert lag.pause_reason == "offset 1: LookupError: encrypted"
        dead = await app.find_stream("orders.dead")
        (letter,) = await read(dead)
        assert letter.data == {"fail": True} and letter.headers["dead"]["error"] == f"ValueError: no such card: {WORD}"
        assert all(is_envelope_text(text) for text in await payloads(sql))
        # A dead letter that is replayed opens in its stream again.
        assert await orders.replay_dead() == 1
        assert (await read(orders))[-1].data == {"fail": True}


def is_envelope_text(text: str) -> bool:
    import json

    return is_envelope(json.loads(text))


async def lagging(stream: Stream[Any], group: str) -> bool:
    return not any(lag.lag for lag in await stream.lag(group))


async def paused(stream: Stream[Any], group: str) -> Any:
    return [lag for lag in await stream.lag(group) if lag.quarantined]


async def test_an_error_that_a_consumer_sends_in_plain_is_not_stored(url: str, sql: Sql, keys: list[str]) -> None:
    app, orders = declared(url, keys, partitions=1)
    async with app:
        stream = await orders.declare()
        refused = "not stored: it was sent without encryption, and the stream is encrypted"
        gone = "offset 3 of partition 0 of stream orders is gone: the first stored offset is 7"
        for error, kept in [
            (f"ValueError: {WORD}", f"ValueError: {refused}"),
            (f"offset 3: ValueError: {WORD}", f"offset 3: ValueError: {refused}"),
            (WORD, refused),
            (gone, gone),
        ]:  # fmt: skip
            found = await sql.fetchval(
                "select penstock.kept_reason(streams, $2) from penstock.streams where name = $1", stream.name, error
            )
            assert found == kept


async def test_a_worker_without_a_key_does_not_take_part_and_says_so(url: str, sql: Sql, keys: list[str]) -> None:
    app, orders = declared(url, keys)
    keyless, its = declared(url, [])
    seen: list[Any] = []

    @orders.consumer(group="billing")
    async def bill(event: Event[Any]) -> None:
        seen.append(event.data)

    @its.consumer(group="billing")
    async def never(event: Event[Any]) -> None:
        raise AssertionError("it has no key")

    async with app, keyless:
        await orders.append({"n": 1})
        async with running_worker(keyless):
            await eventually(lambda: sql.fetchval("select no_key ? 'orders/billing' from penstock.workers"), "that it says so")
            assert [one.no_key for one in await workers(await keyless.database())] == [{"orders/billing": None}]
            async with running_worker(app):
                await eventually(lambda: lagging(orders, "billing"), "the events, at the worker that has the key")
        with pytest.raises(InvalidInput, match="stream orders is encrypted, and this application has no key"):
            async with its.consume("reports"):
                pass
    assert seen == [{"n": 1}]


async def test_events_of_a_key_that_was_removed_wait_without_an_attempt(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()
    app, orders = declared(url, [old], partitions=1)
    async with app:
        await orders.append({"n": 1})
        old_id = app.context.keyring.ids[0]
    app, orders = declared(url, [new], partitions=1)

    @orders.consumer(group="billing", on_failure="skip")
    async def bill(event: Event[Any]) -> None:
        raise AssertionError("it has no key")

    async with app:
        async with running_worker(app):
            (lag,) = await eventually(lambda: failing(orders, "billing"), "the reason")
        assert old_id in lag.failing_error and lag.failing_error.startswith("KeyMissing")
        assert lag.next == 0, "nothing is skipped"
    complete, orders = declared(url, [new, old], partitions=1)
    async with complete, orders.consume("billing", idle_timeout=timedelta(seconds=30)) as batches:
        batch: Batch[Any] = await anext(batches)
        assert batch.records() == [{"n": 1}]


async def failing(stream: Stream[Any], group: str) -> Any:
    return [lag for lag in await stream.lag(group) if lag.failing_error is not None]
