"""Wrong calls of durable steps and signals: each error says what is wrong, and nothing is written."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Conflict, InvalidInput, Job, NewJob, NotFound, Penstock
from penstock.errors import PenstockError
from penstock.jobs.models import make_id
from penstock.testing import run_due_jobs, run_job

Sql: TypeAlias = "asyncpg.Connection[Any]"
Call: TypeAlias = Callable[[Job[Any], Penstock], Awaitable[Any]]


class NoJson:
    pass


def one() -> int:
    return 1


def no_json() -> Any:
    return NoJson()


def large() -> str:
    return "x" * 300_000


def wrong_type() -> int:
    return "seven"  # type: ignore[return-value]


async def twice(job: Job[Any], app: Penstock) -> None:
    await job.step("pay", one)
    await job.step("pay", one)


async def twice_as_another_kind(job: Job[Any], app: Penstock) -> None:
    await job.step("pay", one)
    await job.wait_for("pay")


async def blocking(job: Job[Any], app: Penstock) -> None:
    job.step_blocking("pay", one)


IN_HANDLERS: dict[str, tuple[Call, type[PenstockError], str]] = {
    "a name twice": (twice, InvalidInput, "has two steps of the name pay"),
    "a name for two things": (twice_as_another_kind, InvalidInput, "has two steps of the name pay"),
    "an empty name": (lambda job, _: job.step("", one), InvalidInput, "invalid name of a step: ''"),
    "a name with a slash": (lambda job, _: job.step("a/b", one), InvalidInput, "invalid name of a step: 'a/b'"),
    "a name that is too long": (lambda job, _: job.sleep("x" * 201, timedelta(1)), InvalidInput, "invalid name of a step: 'xxx"),
    "a name that is no text": (lambda job, _: job.wait_for(7), InvalidInput, "invalid name of a step: 7"),  # type: ignore[arg-type]
    "no function": (lambda job, _: job.step("pay", one()), InvalidInput, "the step pay must be a function, not 1"),  # type: ignore[call-overload]
    "a result that is no JSON": (lambda job, _: job.step("pay", no_json), InvalidInput, "the step pay is not JSON"),
    "a result of another type": (lambda job, _: job.step("pay", wrong_type), InvalidInput, "invalid payload for the step pay"),
    "a result that is too large": (lambda job, _: job.step("pay", large), InvalidInput, "has 300,002 bytes, more than 256 KiB"),
    "a sleep that is no span": (lambda job, _: job.sleep("nap", 3), InvalidInput, "must be a span of time, not 3"),  # type: ignore[arg-type]
    "a negative sleep": (lambda job, _: job.sleep("nap", timedelta(-1)), InvalidInput, "must be a span of time"),
    "an endless sleep": (lambda job, _: job.sleep("nap", timedelta(days=4000)), InvalidInput, "must be at most 3660 days"),
    "a timeout that is no span": (lambda job, _: job.wait_for("a", timeout=5), InvalidInput, "the timeout of the wait a must be"),  # type: ignore[call-overload]
    "a signal of no type": (lambda job, _: job.wait_for("a", "Approval"), InvalidInput, "it is not a type"),
    "children that are calls": (lambda job, app: job.gather("c", [app.types["child"](1)]), InvalidInput, "c must be a job, not"),
    "one child": (lambda job, app: job.gather("c", app.types["child"].child(1)), InvalidInput, "the children must be a list"),  # type: ignore[arg-type]
    "a child with an id": (
        lambda job, app: job.gather("c", [app.types["child"].options(id=make_id()).child(1)]),
        InvalidInput, "is given an id or a group",
    ),
    "a child with a unique key": (
        lambda job, app: job.gather("c", [app.types["child"].options(unique="one").child(1)]),
        InvalidInput, "is given a unique key",
    ),
    "a pool as connection": (lambda job, _: job.step("pay", one, connection=object()), InvalidInput, "connection cannot be"),
    "a blocking step on the loop": (blocking, InvalidInput, "a blocking step is taken on the event loop"),
}  # fmt: skip


async def test_a_wrong_call_in_a_handler_says_what_is_wrong(app: Penstock, sql: Sql) -> None:
    said: dict[str, tuple[type[BaseException], str]] = {}

    @app.job("child", max_attempts=1)
    async def child(job: Job[int]) -> None: ...

    @app.job("order", max_attempts=1)
    async def order(job: Job[str]) -> None:
        try:
            await IN_HANDLERS[job.data][0](job, app)
        except PenstockError as error:
            said[job.data] = (type(error), str(error))

    await order.enqueue_many([NewJob(name) for name in IN_HANDLERS])
    await run_due_jobs(app, "order")
    for name, (_, kind, message) in IN_HANDLERS.items():
        assert name in said, f"{name}: no error"
        assert said[name][0] is kind and message in said[name][1], (name, said[name])
    # What a handler catches does not hold the job up; what was kept are the steps of the two that did one.
    assert await sql.fetchval("select count(*) from penstock.job_steps") == 2
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0


async def test_only_handlers_that_run_again_have_steps(app: Penstock) -> None:
    said: list[str] = []

    def note(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[None]]:
        @functools.wraps(call)
        async def noting(job: Any) -> None:
            try:
                await call(job)
            except Conflict as error:
                said.append(str(error))

        return noting

    @app.job("once", delivery="at_most_once")
    async def once(job: Job[Any]) -> None:
        await job.step("pay", one)
        await note(lambda job: job.sleep("nap", timedelta(1)))(job)

    @app.job("batch", max_batch_size=10)
    async def batch(jobs: list[Job[Any]]) -> None:
        await note(lambda job: job.step("pay", one))(jobs[0])

    await once.enqueue({})
    await batch.enqueue({})
    records = await run_due_jobs(app)
    assert [record.status for record in records] == ["succeeded", "succeeded"]
    assert sorted(text.split(" can")[1].split("\n")[0] for text in said) == [
        " have no durable steps: the handler of batch takes batches",
        "not be suspended, since it may start only once",
    ]
    with pytest.raises(Conflict, match="cannot wait for the signal approved"):
        await run_job(app.job("alone")(_waits))


async def _waits(job: Job[Any]) -> None:
    await job.wait_for("approved")


LARGE = "(select to_jsonb(string_agg(md5(i::text), '')) from generate_series(1, 9000) as i)"
WRITE = "select penstock.write_steps(array[{id}], %s, array[%s], array['1'::jsonb])"
BEGIN = "select penstock.begin_waits(array[{id}], array[1], %s)"
FROM_OUTSIDE: list[tuple[str, str, str]] = [
    ("select penstock.signal(null, 'a')", "PS404", "no such job: null"),
    ("select penstock.signal({id}, '')", "PS400", "invalid name of a signal: ''"),
    ("select penstock.signal({id}, 'a/b')", "PS400", "invalid name of a signal: 'a/b'"),
    ("select penstock.signal({id}, null)", "PS400", "invalid name of a signal: null"),
    (f"select penstock.signal({{id}}, 'a', {LARGE})", "PS413", "the value of a signal a is larger than 256 KiB"),
    ("select penstock.signal({id}, 'a', '1e400')", "PS400", "a number"),
    (WRITE % ("null", "'a'"), "PS400", "without its lease"),
    (WRITE % ("array[1]", "'a/b'"), "PS400", "invalid name of a step"),
    (BEGIN % "array['nap'], array['a']", "PS400", "wait for what is not known"),
    (BEGIN % "array['sleep'], array['a'], array[null::interval]", "PS400", "wait for what is not known"),
    (BEGIN % "array['sleep'], array['a'], array['20 years'::interval]", "PS400", "cannot wait for 20 years"),
    (BEGIN % "array['wait'], array['a'], array['-1 day'::interval]", "PS400", "cannot wait for -1 day"),
    (
        "select penstock.settle(array[{id}], array[1::smallint], array[1], array['suspended'])",
        "PS400", "without the step for which it waits",
    ),
]  # fmt: skip


async def test_a_wrong_call_in_sql_says_what_is_wrong(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("order")
    receipt = await app.enqueue("order")
    for call, state, message in FROM_OUTSIDE:
        with pytest.raises(asyncpg.PostgresError) as error:
            await sql.fetch(call.format(id=f"'{receipt.id}'::uuid"))
        assert (error.value.sqlstate, message in str(error.value)) == (state, True), (call, error.value)
    # It is not held under this lease: nothing is kept.
    lease = f"array['{receipt.id}'::uuid], array[7::bigint]"
    assert await sql.fetchval(f"select outcome from penstock.write_steps({lease}, array['a'], array['1'::jsonb])") == "stale"
    assert await sql.fetchval(f"select state from penstock.begin_waits({lease}, array['wait'], array['a'])") == "stale"
    assert await sql.fetchval("select count(*) from penstock.job_steps") == 0


async def test_a_wrong_signal_says_what_is_wrong(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("order")
    receipt = await app.enqueue("order")
    for id, name, value, kind, message in (
        (make_id(), "a", 1, NotFound, "no such job"),
        ("job_7", "a", 1, InvalidInput, "job_7"),
        (receipt.id, "a/b", 1, InvalidInput, "invalid name of a signal"),
        (receipt.id, "a", NoJson(), InvalidInput, "the signal a is not JSON"),
        (receipt.id, "a", "x" * 300_000, InvalidInput, "larger than 256 KiB"),
    ):
        with pytest.raises(kind, match=message):
            await app.signal(id, name, value)
    await sql.execute(
        "insert into penstock.job_signals (at, job, name, value)"
        " select now(), $1, 's' || i, '1' from generate_series(1, 1000) as i",
        receipt.id,
    )
    with pytest.raises(Conflict, match="has 1000 signals already"):
        await app.signal(receipt.id, "one more")
