"""Errors of the database, each as one of Penstock's kinds, and a worker that outlives them."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from penstock import Conflict, DatabaseUnavailable, InvalidInput, Job, JobFailed, Penstock, PenstockError, Settings, Status
from penstock.postgres.translation import StatementCancelled
from penstock.testing import running_worker
from tests.activity import seen_now
from tests.waiting import eventually


@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [
        ("23505", Conflict),
        ("25006", DatabaseUnavailable),
        ("25P03", DatabaseUnavailable),
        ("40001", DatabaseUnavailable),
        ("40P01", DatabaseUnavailable),
        ("53100", DatabaseUnavailable),
        ("57014", StatementCancelled),
        ("57P01", DatabaseUnavailable),
        ("54000", InvalidInput),
        ("22003", InvalidInput),
        ("42501", PenstockError),
        ("XX000", PenstockError),
        ("P0001", PenstockError),
    ],
)
async def test_every_error_of_the_server_is_one_of_ours(app: Penstock, sqlstate: str, kind: type[PenstockError]) -> None:
    database = await app.database()
    await database.fetch(
        "create or replace function pg_temp.fail(state text) returns void language plpgsql as"
        " $$ begin raise exception 'on purpose' using errcode = state; end $$"
    )
    with pytest.raises(PenstockError, match="on purpose") as caught:
        await database.fetch("select pg_temp.fail($1)", sqlstate)
    assert type(caught.value) is kind


async def test_a_value_that_python_cannot_hold_is_one_of_ours(app: Penstock) -> None:
    with pytest.raises(PenstockError, match="Python cannot"):
        await (await app.database()).fetch("select interval '3000000 years'")


async def test_what_may_lie_in_the_call_is_not_repeated_for_ever(app: Penstock) -> None:
    database = await app.database()
    await database.fetch("create table public.twice (id int primary key)")
    await database.fetch("insert into public.twice values (1)")
    with pytest.raises(Conflict, match="duplicate key"):
        await asyncio.wait_for(database.fetch("insert into public.twice values (1)", retry=True), 60)


async def test_a_worker_goes_on_after_an_internal_error_of_the_driver_while_it_listens(
    app: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.job
    async def ship(number: int) -> None: ...

    # What asyncpg raises when the server ends a connection at the moment at which a statement begins.
    failures = iter([asyncpg.InternalClientError("cannot switch to state 11; another operation (2) is in progress")] * 2)
    add_listener = asyncpg.Connection.add_listener

    async def failing(connection: Any, channel: str, callback: Any) -> None:
        for error in failures:
            raise error
        await add_listener(connection, channel, callback)

    monkeypatch.setattr(asyncpg.Connection, "add_listener", failing)
    async with running_worker(app):
        receipt = await ship.enqueue(1)
        assert (await app.wait(receipt.id)).status is Status.SUCCEEDED
        await eventually(lambda: next(failures, None) is None, "both errors")


async def test_a_worker_starts_whose_connection_is_lost_while_it_registers(app: Penstock, sql: asyncpg.Connection[Any]) -> None:
    @app.job
    async def ship(number: int) -> None: ...

    await sql.execute(
        """
        create schema losing;
        create sequence losing.registrations;
        create function losing.lose() returns trigger language plpgsql as $$
        begin
            if nextval('losing.registrations') <= 2 then
                perform pg_terminate_backend(pg_backend_pid());
                perform pg_sleep(600);
            end if;
            return new;
        end
        $$;
        create trigger losing before insert on penstock.workers for each row execute function losing.lose();
        """
    )
    async with running_worker(app):
        assert (await app.wait((await ship.enqueue(1)).id)).status == Status.SUCCEEDED
        assert [worker.state for worker in await app.workers()] == ["running"]


async def test_a_worker_works_on_where_the_default_of_a_database_becomes_read_only(
    url: str, sql: asyncpg.Connection[Any]
) -> None:
    async with Penstock(url, settings=Settings(heartbeat_interval=0.2, poll_interval=0.1)) as app:

        @app.job("steady")
        async def steady(job: Job[Any]) -> None: ...

        async with running_worker(app, at_once=True):
            await app.wait((await steady.enqueue()).id)
            name = await sql.fetchval("select current_database()")
            await sql.execute(f'alter database "{name}" set default_transaction_read_only = on')
            await _end_others(sql)
            job = await eventually(lambda: _enqueue(steady), "a new connection")
            assert (await app.wait(job.id)).status is Status.SUCCEEDED


async def test_a_worker_outlives_the_cancellation_of_its_calls(url: str, sql: asyncpg.Connection[Any]) -> None:
    async with Penstock(url, settings=Settings(poll_interval=0.1)) as app:

        @app.job("steady")
        async def steady(job: Job[Any]) -> None: ...

        async with running_worker(app, at_once=True):
            async with sql.transaction():
                await sql.execute("lock table penstock.queued_jobs in access exclusive mode")
                cancel = (
                    "select count(pg_cancel_backend(pid)) from pg_stat_activity"
                    " where query like any (array['%penstock.claim(%', '%penstock.wait_for_jobs(%'])"
                    " and wait_event_type = 'Lock' and datname = current_database()"
                )
                await eventually(lambda: seen_now(sql, cancel), "a call of the fetcher that waits")
            await app.wait((await steady.enqueue()).id)


async def test_a_result_that_the_database_refuses_fails_its_own_job_alone(app: Penstock, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin if new.result::text = '\"bad\"' then raise exception 'too large' using errcode = '54000'; end if;"
        " return new; end $$;"
        " create trigger refuse before insert on penstock.archived_jobs for each row execute function refuse()"
    )

    @app.job("result", max_attempts=1, keep_result=True)
    async def result(job: Job[str]) -> str:
        return job.data

    receipts = await result.enqueue_many(["good", "bad", "fine"])
    async with running_worker(app, at_once=True):
        with pytest.raises(JobFailed, match="result was refused.*too large"):
            await app.wait(receipts[1].id)
        assert [(await app.wait(receipts[place].id)).result for place in (0, 2)] == ["good", "fine"]


async def test_progress_that_the_database_refuses_does_not_end_the_worker(app: Penstock, sql: asyncpg.Connection[Any]) -> None:
    refuses, go_on = asyncio.Event(), asyncio.Event()

    @app.job("import")
    async def import_rows(job: Job[Any]) -> None:
        await refuses.wait()
        job.progress("x" * 200)
        await go_on.wait()

    await sql.execute(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'refused' using errcode = 'XX000'; end $$"
    )
    async with running_worker(app, at_once=True):
        receipt = await import_rows.enqueue()
        await eventually(lambda: _in_progress(app, receipt.id), "a start")
        await sql.execute("create trigger refuse before update on penstock.queued_jobs for each row execute function refuse()")
        refused = "select xact_rollback from pg_stat_database where datname = current_database()"
        before = await sql.fetchval(refused)
        refuses.set()
        await eventually(lambda: _more(sql, refused, before), "a refusal")
        await sql.execute("drop trigger refuse on penstock.queued_jobs")
        go_on.set()
        await app.wait(receipt.id)


async def _end_others(sql: asyncpg.Connection[Any]) -> None:
    await sql.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )


async def _enqueue(type_: Any) -> Any:
    try:
        return await type_.enqueue()
    except DatabaseUnavailable:
        return None


async def _in_progress(app: Penstock, id: Any) -> bool:
    return (await app.find(id)).status is Status.IN_PROGRESS


async def _more(sql: asyncpg.Connection[Any], query: str, before: int) -> bool:
    return bool(await seen_now(sql, query) > before)
