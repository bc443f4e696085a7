"""Jobs of encrypted types: what is stored, who may write, who may read, and what happens without a key."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import psycopg
import pytest

from penstock import Fail, Job, NewJob, Penstock, Retry, Settings, Status
from penstock.core.encryption import is_envelope, key_id_of, new_key
from penstock.errors import InvalidInput, JobFailed
from penstock.testing import advance, run_due_jobs
from penstock.worker import Worker
from penstock.worker.fleets import workers
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
WORD = "quokka"


def declared(
    url: str, keys: list[str], *, encrypted: bool = True, go_on: asyncio.Event | None = None, **options: Any
) -> Penstock:
    """An application with a type whose jobs report progress, wait until they may go on, and end as their payload says."""
    app = Penstock(url, keys=keys, settings=Settings(heartbeat_interval=timedelta(seconds=0.3)))

    @app.job("payments", encrypted=encrypted, keep_result=True, max_attempts=options.pop("max_attempts", 1), **options)
    async def pay(job: Job[dict[str, Any]]) -> Any:
        job.progress({"half": WORD})
        job.log(f"paying with {WORD}")
        if go_on is not None:
            await go_on.wait()
        if job.data.get("fail"):
            raise Fail(f"no such card: {WORD}")
        return {"paid": job.data}

    return app


@pytest.fixture
def keys() -> list[str]:
    return [new_key()]


async def working(app: Penstock) -> tuple[Worker, asyncio.Task[None]]:
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await worker.started()
    return worker, running


async def stored(sql: Sql) -> str:
    """All that the tables of the schema have, as text."""
    found = []
    for (name,) in await sql.fetch("select table_name from information_schema.tables where table_schema = 'penstock'"):
        found += [row[0] for row in await sql.fetch(f'select t::text from penstock."{name}" as t')]
    return "\n".join(found)


async def test_payload_result_and_error_lie_encrypted_and_are_read_with_the_key(url: str, sql: Sql, keys: list[str]) -> None:
    async with declared(url, keys) as app:
        good = await app.enqueue("payments", {"card": WORD})
        bad = await app.enqueue("payments", {"card": WORD, "fail": True})
        assert key_id_of(await sql.fetchval("select data::text from penstock.queued_jobs limit 1")) == app.context.keyring.ids[0]
        records = {record.id: record for record in await run_due_jobs(app)}
        assert WORD not in await stored(sql)

        paid = records[good.id]
        assert (paid.encrypted, paid.data, paid.result) == (True, {"card": WORD}, {"paid": {"card": WORD}})
        assert [line.line for line in paid.log] == [f"paying with {WORD}"]
        failed = records[bad.id]
        assert failed.errors[0]["message"] == f"no such card: {WORD}"
        assert WORD in failed.errors[0]["traceback"]
        error = json.loads(await sql.fetchval("select errors -> 0 from penstock.archived_jobs where id = $1", bad.id))
        assert error["type"] == "Fail" and error["attempt"] == 1 and is_envelope({"penstock": error["penstock"]})
        assert "message" not in error and "traceback" not in error
        with pytest.raises(JobFailed, match=WORD):
            await app.wait(bad.id)


async def test_progress_lies_encrypted(url: str, sql: Sql, keys: list[str]) -> None:
    go_on = asyncio.Event()
    async with declared(url, keys, go_on=go_on) as app:
        worker, running = await working(app)
        job = await app.enqueue("payments", {})
        progress = await eventually(lambda: sql.fetchval("select progress::text from penstock.queued_jobs"), "the progress")
        assert key_id_of(progress) == app.context.keyring.ids[0]
        assert (await app.find(job.id)).progress == {"half": WORD}
        go_on.set()
        worker.stop()
        await running


async def test_a_reader_without_the_key_sees_that_it_is_encrypted(url: str, keys: list[str]) -> None:
    async with declared(url, keys) as app:
        good = await app.enqueue("payments", {"card": WORD})
        bad = await app.enqueue("payments", {"fail": True})
        await run_due_jobs(app)
    for other in (Penstock(url), Penstock(url, keys=[new_key()])):
        async with other:
            record = await other.find(good.id)
            assert (record.encrypted, record.data, record.result) == (True, "encrypted", "encrypted")
            assert [line.line for line in record.log] == ["encrypted"]
            (error,) = (await other.find(bad.id)).errors
            assert (error["type"], error["message"], error["attempt"]) == ("Fail", "encrypted", 1)
            assert [one.data for one in await other.find_many(name="payments")] == ["encrypted", "encrypted"]


async def test_what_only_looks_like_an_envelope_is_what_it_is(url: str) -> None:
    """A type that never was encrypted has no envelopes."""
    lookalike = {"penstock": {"v": 1, "kid": "AAAAAAAA", "c": "A" * 40}}
    async with declared(url, [new_key()], encrypted=False) as app:
        job = await app.enqueue("payments", lookalike)
        (record,) = await run_due_jobs(app)
        assert (record.encrypted, record.data, record.result) == (False, lookalike, {"paid": lookalike})
        assert (await app.find(job.id)).status is Status.SUCCEEDED


PLAIN_WRITES = [
    "select penstock.enqueue('payments', '{\"card\": 1}')",
    "select penstock.enqueue('payments')",
    "select penstock.enqueue_many('payments', array['{}'::jsonb, '{\"penstock\": 1}'])",
    "select penstock.enqueue_json('payments', '[{\"data\": {\"card\": 1}}]')",
    "select penstock.put_jobs('payments', array['{}'::jsonb], array[gen_random_uuid()])",
    'select penstock.enqueue(\'payments\', \'{"penstock": {"v": 1, "kid": "a", "c": "the words themselves"}}\')',
    "insert into penstock.staged_jobs (writer, part, place, name, data) values ('w', '1.a.b', 0, 'payments', '{\"card\": 1}')",
]


@pytest.mark.parametrize("statement", PLAIN_WRITES)
async def test_a_producer_without_a_key_is_refused_with_the_reason(url: str, sql: Sql, keys: list[str], statement: str) -> None:
    async with declared(url, keys) as app:
        await app.declare()
        with pytest.raises(asyncpg.PostgresError, match="job type payments is encrypted, and document") as refused:
            await sql.execute(statement)
        assert refused.value.sqlstate == "PS400"
        assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0
        assert await sql.fetchval("select count(*) from penstock.staged_jobs") == 0


async def test_a_writer_of_spark_that_staged_before_is_refused_too(url: str, sql: Sql, keys: list[str]) -> None:
    await sql.execute("select penstock.create_job_type('payments')")
    await sql.execute(
        "insert into penstock.staged_jobs (writer, part, place, name, data) values ('w', '1.a.b', 0, 'payments', '{\"card\": 1}')"
    )
    async with declared(url, keys) as app:
        await app.declare()
        with pytest.raises(asyncpg.PostgresError, match="is encrypted"):
            await sql.execute("select penstock.commit_staged('w', 1, '{1.a.b}', 1, 'job payments')")


async def test_an_application_with_an_older_declaration_or_none_is_refused(url: str, keys: list[str]) -> None:
    async with declared(url, keys) as app:
        await app.declare()
        async with declared(url, keys, encrypted=False) as older:
            assert [one.encrypted for one in await older.job_types()] == [True], "a declaration never turns encryption off"
            with pytest.raises(InvalidInput, match="job type payments is encrypted"):
                await older.types["payments"].enqueue({"card": 1})
        async with Penstock(url, keys=keys) as unaware:
            with pytest.raises(InvalidInput, match="job type payments is encrypted") as refused:
                await unaware.enqueue("payments", {"card": 1})
            assert "encrypted=True" in str(refused.value)


async def test_an_application_without_a_key_does_not_send_the_payload(url: str, keys: list[str]) -> None:
    async with declared(url, []) as app:
        with pytest.raises(InvalidInput, match="job payments is encrypted, and this application has no key"):
            await app.enqueue("payments", {"card": WORD})


async def test_an_envelope_of_another_type_is_quarantined(url: str, sql: Sql, keys: list[str]) -> None:
    async with declared(url, keys) as app:

        @app.job("refunds", encrypted=True)
        async def refund(job: Job[dict[str, Any]]) -> None: ...

        await app.declare()
        await app.enqueue("payments", {"card": 1})
        await sql.execute("update penstock.queued_jobs set name = 'refunds'")
        (record,) = await run_due_jobs(app, "refunds")
        assert (record.reason, record.data) == ("quarantined", "encrypted")
        assert "belongs to something else" in record.errors[0]["message"]


async def test_turning_encryption_on_and_off_leaves_no_job_behind(url: str, sql: Sql, keys: list[str]) -> None:
    async with declared(url, keys, encrypted=False) as before:
        plain = await before.enqueue("payments", {"n": 1})
    async with declared(url, keys) as app:
        sealed = await app.enqueue("payments", {"n": 2})
        await sql.execute("""select penstock.change_job_type('payments', '{"encrypted": false}')""")
        await sql.execute("select penstock.enqueue('payments', '{\"n\": 3}')")
        still = await app.enqueue("payments", {"n": 4})
    for reader in (declared(url, keys, encrypted=False), declared(url, keys)):
        async with reader:
            records = {record.id: record for record in await run_due_jobs(reader)}
            if records:
                assert sorted(record.data["n"] for record in records.values()) == [1, 2, 3, 4]
                assert [records[one.id].encrypted for one in (plain, sealed, still)] == [False, True, True]
                assert all(record.status is Status.SUCCEEDED for record in records.values())


async def test_what_plain_attempts_report_of_an_encrypted_type_is_left_out(url: str, sql: Sql, keys: list[str]) -> None:
    """A worker that has not heard yet that the type is encrypted."""
    async with declared(url, keys) as app:
        receipts = [await app.enqueue("payments", {"n": n}) for n in range(2)]
        held = await sql.fetch(
            "select id, attempt, lease from penstock.claim('w', '{payments}', 2, '{}', $1)", app.context.keyring.ids
        )
        await sql.execute(
            "select penstock.report_progress(array[$1::uuid], array[$2::bigint], array['{\"half\": 1}'::jsonb])",
            held[0]["id"], held[0]["lease"],
        )  # fmt: skip
        assert await sql.fetchval("select count(progress) from penstock.queued_jobs") == 0
        await sql.execute(
            "select penstock.append_log(array[$1::uuid], array[$2::bigint], array[$3])", held[0]["id"], held[0]["lease"], WORD
        )
        details = [{"type": "x", "word": WORD}, {"type": "KeyError", "message": WORD, "traceback": WORD}]
        for row, outcome, detail in zip(held, ["succeeded", "failed"], details, strict=True):
            await sql.execute(
                "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array[$4], array[$5::jsonb])",
                row["id"], row["attempt"], row["lease"], outcome, json.dumps(detail),
            )  # fmt: skip
        assert WORD not in await stored(sql)
        records = {(await app.find(one.id)).status: await app.find(one.id) for one in receipts}
        assert records[Status.SUCCEEDED].result is None
        assert records[Status.FAILED].errors[0]["type"] == "KeyError"
        assert "sent without encryption" in records[Status.FAILED].errors[0]["message"]


async def test_a_replay_opens_under_its_new_id_and_another_payload_is_encrypted(url: str, sql: Sql, keys: list[str]) -> None:
    async with declared(url, keys) as app:
        first = await app.enqueue("payments", {"card": WORD})
        await run_due_jobs(app)
        same = await app.replay(first.id)
        other = await app.replay(first.id, data={"card": "other " + WORD}, force=True)
        with pytest.raises(asyncpg.PostgresError, match="is encrypted"):
            await sql.execute("select penstock.replay($1, null, '{}', p_force => true)", first.id)
        records = {record.id: record.data for record in await run_due_jobs(app)}
        assert records == {same.id: {"card": WORD}, other.id: {"card": "other " + WORD}}
        assert WORD not in await stored(sql)


async def test_a_replay_of_a_job_from_before_is_encrypted(url: str, sql: Sql, keys: list[str]) -> None:
    async with declared(url, keys, encrypted=False) as before:
        first = await before.enqueue("payments", {"n": 1})
        await run_due_jobs(before)
    async with declared(url, keys) as app:
        copy = await app.replay(first.id)
        assert key_id_of(await sql.fetchval("select data::text from penstock.queued_jobs"))
        assert [(record.id, record.data) for record in await run_due_jobs(app)] == [(copy.id, {"n": 1})]


async def test_old_documents_are_read_and_new_ones_written_with_the_new_key(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()
    async with declared(url, [old]) as app:
        await app.enqueue("payments", {"n": 1})
    async with declared(url, [new, old]) as app:
        await app.enqueue("payments", {"n": 2})
        ids = [key_id_of(row[0]) for row in await sql.fetch("select data::text from penstock.queued_jobs order by seq")]
        assert ids == [app.context.keyring.ids[1], app.context.keyring.ids[0]]
        assert sorted(record.data["n"] for record in await run_due_jobs(app)) == [1, 2]
        results = [key_id_of(row[0]) for row in await sql.fetch("select result::text from penstock.archived_jobs")]
        assert results == [app.context.keyring.ids[0]] * 2


async def test_a_worker_without_a_key_does_not_claim_the_type_and_says_so(url: str, sql: Sql, keys: list[str]) -> None:
    async with declared(url, keys) as app:
        job = await app.enqueue("payments", {"n": 1})
        keyless = declared(url, [])

        @keyless.job("mails")
        async def mail(job: Job[Any]) -> None: ...

        async with keyless:
            worker, running = await working(keyless)
            await keyless.enqueue("mails", {})
            await eventually(lambda: sql.fetchval("select count(*) from penstock.archived_jobs where name = 'mails'"), "the mail")
            assert [one.no_key for one in await workers(await keyless.database())] == [{"payments": None}]
            why = await keyless.why(job.id)
            assert why.reason == "no-key" and app.context.keyring.ids[0] in why.message
            assert (await app.find(job.id)).attempt == 1
            worker.stop()
            await running
        assert [record.data for record in await run_due_jobs(app)] == [{"n": 1}]


async def test_jobs_of_a_key_that_was_removed_wait_and_say_why_while_others_run(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()
    async with declared(url, [old]) as app:
        waiting = await app.enqueue_many("payments", [{"n": n} for n in range(3)])
        old_id = app.context.keyring.ids[0]
    async with declared(url, [new]) as app:
        worker, running = await working(app)
        done = await app.enqueue("payments", {"n": 9})
        assert (await app.wait(done.id, timeout=timedelta(seconds=20))).result == {"paid": {"n": 9}}
        await eventually(
            lambda: sql.fetchval("select no_key ->> 'payments' = $1 from penstock.workers", old_id), "the missing key"
        )
        why = await app.why(waiting[0].id)
        assert why.reason == "no-key" and old_id in why.message
        assert [(await app.find(one.id)).attempt for one in waiting] == [1, 1, 1], "no attempt is used up"
        async with declared(url, [new, old]) as complete:
            second, also = await working(complete)
            for one in waiting:
                assert (await complete.wait(one.id, timeout=timedelta(seconds=20))).status is Status.SUCCEEDED
            second.stop()
            await also
        await eventually(lambda: sql.fetchval("select no_key = '{}' from penstock.workers"), "that no key is missing")
        worker.stop()
        await running


async def test_handlers_in_threads_and_processes_get_the_payload(url: str, sql: Sql) -> None:
    from tests.encryption.process_app import KEY
    from tests.encryption.process_app import app as module_app

    async with Penstock(url, keys=[KEY]) as app:
        for name, executor in (("in-thread", "thread"), ("in-process", "process")):
            handler = module_app.types[name].handler
            assert handler is not None
            app.job(name, encrypted=True, keep_result=True, executor=executor)(handler)  # type: ignore[call-overload]
            await app.enqueue(name, {"card": WORD})
        records = await run_due_jobs(app)
        assert {(record.name, str(record.result)) for record in records} == {
            ("in-thread", f"got {WORD}"),
            ("in-process", f"got {WORD}"),
        }
        assert WORD not in await stored(sql)


async def test_jobs_of_a_pool_are_encrypted_and_keep_their_order(url: str, sql: Sql, keys: list[str]) -> None:
    async with Penstock(url, keys=keys) as app:
        ledger = app.pool("ledger", encrypted=True, keep_result=True)
        seen: list[int] = []

        @ledger.job
        async def book(job: Job[dict[str, Any]]) -> str:
            seen.append(job.data["n"])
            return WORD

        await ledger.enqueue_many([(f"acme-{n % 2}", {"n": n, "word": WORD}) for n in range(6)])
        assert WORD not in await stored(sql)
        worker, running = await working(app)
        await eventually(lambda: sql.fetchval("select count(*) = 6 from penstock.archived_jobs"), "the jobs")
        worker.stop()
        await running
        assert [n for n in seen if n % 2] == [1, 3, 5] and [n for n in seen if not n % 2] == [0, 2, 4]
        assert WORD not in await stored(sql)


async def test_a_pull_worker_without_a_key_is_refused_and_one_with_it_works(url: str, sql: Sql, keys: list[str]) -> None:
    async with Penstock(url, keys=keys) as app:
        ledger = app.pool("ledger", encrypted=True, keep_result=True)
        receipt = await ledger.enqueue("acme", {"word": WORD})
        async with Penstock(url) as keyless:
            pool = keyless.pool("ledger", encrypted=True)
            with pytest.raises(InvalidInput, match="pool ledger is encrypted, and this application has no key"):
                async with pool.worker():
                    pass
        async with ledger.worker() as puller:
            async for job in puller.jobs():
                assert job.data == {"word": WORD}
                await job.ack({"got": WORD})
                break
        assert (await app.find(receipt.id)).result == {"got": WORD}
        assert WORD not in await stored(sql)


async def test_a_batch_of_jobs_with_ids_and_keys_is_idempotent(url: str, keys: list[str]) -> None:
    async with declared(url, keys) as app:
        new = [NewJob({"n": n}, id=f"0192f7a8-7b5c-7d6e-8f90-00000000000{n}") for n in range(3)]
        await app.enqueue_many("payments", new)
        again = await app.enqueue_many("payments", new)
        assert {str(one.outcome) for one in again} == {"duplicate"}


async def test_steps_and_signals_lie_encrypted_and_are_read_with_the_key(url: str, sql: Sql, keys: list[str]) -> None:
    app = Penstock(url, keys=keys)

    @app.job("payments", encrypted=True, keep_result=True)
    async def pay(job: Job[Any]) -> Any:
        charged = await job.step("charge", lambda: WORD)
        return [charged, await job.wait_for("approved", dict[str, str])]

    async with app:
        receipt = await app.enqueue("payments", {})
        await run_due_jobs(app)
        assert (await app.find(receipt.id)).status is Status.WAITING
        with pytest.raises(asyncpg.PostgresError, match="job type payments is encrypted, and document 1 of 1 is not"):
            await sql.execute("select penstock.signal($1, 'approved', '{}')", receipt.id)
        async with Penstock(url) as other:
            with pytest.raises(InvalidInput, match="is encrypted"):
                await other.signal(receipt.id, "approved", {"by": WORD})
        assert await app.signal(receipt.id, "approved", {"by": WORD})
        await run_due_jobs(app)
        assert WORD not in await stored(sql)
        assert (await app.find(receipt.id)).result == [WORD, {"by": WORD}]
        assert [step.result for step in await app.steps(receipt.id)] == [WORD, {"by": WORD}]
    async with Penstock(url) as other:
        assert [step.result for step in await other.steps(receipt.id)] == ["encrypted", "encrypted"]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_signal_to_an_encrypted_job_of_the_same_transaction_lies_encrypted(
    url: str, sql: Sql, keys: list[str], driver: str
) -> None:
    app = Penstock(url, keys=keys)

    @app.job("payments", encrypted=True, keep_result=True)
    async def pay(job: Job[Any]) -> Any:
        return await job.wait_for("approved", dict[str, str])

    async with app:
        await pay.declare()
        if driver == "asyncpg":
            async with sql.transaction():
                receipt = await app.enqueue("payments", {}, connection=sql)
                assert await app.signal(receipt.id, "approved", {"by": WORD}, connection=sql)
        else:
            async with await psycopg.AsyncConnection.connect(url) as connection:
                receipt = await app.enqueue("payments", {}, connection=connection)
                assert await app.signal(receipt.id, "approved", {"by": WORD}, connection=connection)
        assert WORD not in await stored(sql)
        await run_due_jobs(app)
        assert (await app.find(receipt.id)).result == {"by": WORD}


async def test_a_plain_job_keeps_nothing_of_its_encrypted_children(url: str, sql: Sql, keys: list[str]) -> None:
    got: list[Any] = []

    def gathering(keys: list[str]) -> Penstock:
        app = declared(url, keys)

        @app.job("order", max_attempts=3)
        async def order(job: Job[bool]) -> None:
            got.append(await job.gather("parts", [app.types["payments"].child({"word": WORD, "fail": job.data})]))
            if len(got) == 1:
                raise Retry("once more, with the results as they are in the archive")

        return app

    async with gathering(keys) as app:
        good, bad = await app.enqueue("order", False), await app.enqueue("order", True)
        await run_due_jobs(app, "order")
        await run_due_jobs(app, "payments")
    async with gathering([new_key()]) as other:
        await run_due_jobs(other, "order")
        # Another worker may have the key.
        record = await other.find(good.id)
        assert (record.status, record.attempt, record.errors[-1]["type"]) == (Status.QUEUED, 2, "KeyMissing")
        assert (await other.find(bad.id)).errors[-1]["type"] == "JobFailed"
    async with gathering(keys) as app:
        for _ in range(2):
            await advance(app, timedelta(days=1))
            await run_due_jobs(app)
        assert [(await app.find(one.id)).status for one in (good, bad)] == [Status.SUCCEEDED, Status.FAILED]
        assert got == [[{"paid": {"word": WORD, "fail": False}}]] * 2
    assert WORD not in await stored(sql)


async def test_a_worker_in_sql_cannot_keep_a_plain_step_of_an_encrypted_job(url: str, sql: Sql, keys: list[str]) -> None:
    async with declared(url, keys) as app:
        await app.enqueue("payments", {})
        job = await sql.fetchrow(
            "select * from penstock.claim('psql', '{payments}', 1, p_keys => $1)", list(app.context.keyring.ids)
        )
        with pytest.raises(asyncpg.PostgresError, match="job type payments is encrypted"):
            await sql.fetch(
                "select penstock.write_steps(array[$1::uuid], array[$2::bigint], array['charge'], array['1'::jsonb])",
                job["id"], job["lease"],
            )  # fmt: skip
