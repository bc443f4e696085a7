"""Declarations and calls with values of the wrong kind are refused by name and value, with the right form where one helps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import EnqueueOutcome, InvalidInput, NewJob, Penstock, RateLimit
from tests.command_line import penstock

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prefetch_per_key": 0}, "prefetch_per_key of work must be an integer from 1 to 10,000, not 0"),
        ({"prefetch_per_key": 1.5}, "prefetch_per_key of work"),
        ({"slots": "8"}, "slots of work"),
        ({"slots": True}, "slots of work"),
        ({"key_concurrency": 0}, "key_concurrency of work"),
        ({"key_rate": 5}, "key_rate of work must be a RateLimit, not 5"),
        ({"key_rate": RateLimit(5, 1)}, "the period of key_rate of work must be a span of time, not 1"),
        ({"key_rate": RateLimit(0, timedelta(seconds=1))}, "the limit of key_rate of work"),
        ({"weights": ["acme"]}, "weights of work must be a mapping"),
        ({"weights": {"acme": 0}}, "the weight of 'acme' in work"),
        ({"assign": "jump"}, "assign of work must be a plain function"),
        ({"assignor": "random"}, "unknown assignor of work: 'random'"),
        ({"on_retry": "wait"}, "on_retry of work must be block or skip"),
        ({"max_attemps": 3}, "pool work has no option max_attemps (it was given 3)"),
        ({"max_attempts": 2.5}, "max_attempts of pool work"),
        ({"rate_limit": 20}, "rate_limit of pool work must be a RateLimit"),
        ({"backoff": timedelta(seconds=3)}, "backoff of pool work must be a Backoff"),
    ],
)
def test_a_pool_is_declared_with_values_of_the_right_kind(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        Penstock().pool("work", **wrong)
    assert message in raised.value.message


def test_an_option_of_a_pool_that_its_handler_is_given_is_refused_with_the_place_for_it() -> None:
    pool = Penstock().pool("work")
    with pytest.raises(InvalidInput) as raised:
        pool.job(max_attempts=4)
    assert "the handler of pool work has no option max_attempts (it was given 4)" in raised.value.message
    assert raised.value.hint is not None
    assert 'app.pool("work", max_attempts=...)' in raised.value.hint


@pytest.mark.parametrize("given", [{"tenant": "acme"}, 5, None, b"acme"])
async def test_a_payload_in_place_of_the_key_of_a_pool_is_refused_as_a_key(given: Any) -> None:
    pool = Penstock().pool("work", payload=dict[str, str], key="tenant")
    with pytest.raises(InvalidInput) as raised:
        await pool.enqueue(given)
    assert "the key of a job of work must be text" in raised.value.message
    assert raised.value.hint is not None
    assert "pool.enqueue(key, payload)" in raised.value.hint


NAMES: list[Any] = ["", " ", "a b", "a/b", "a\n", "a\x00", "\x7f", ".", "..", 5, b"a"]
DECLARATIONS: dict[str, tuple[Callable[[Penstock, Any], object], int, str]] = {
    "job type name": (lambda app, name: app.job_type(name), 200, "select penstock.check_name($1)"),
    "client id": (
        lambda app, name: app.topic("t").subscriber(name),
        198,
        "select penstock.check_subscribers('t', array[$1], null, null, null)",
    ),
    "topic": (lambda app, name: app.topic(name), 150, "select penstock.check_topic($1)"),
    "name of a schedule": (
        lambda app, name: app.timer(every=timedelta(hours=1), name=name or " ", as_job=False)(lambda: None),
        200,
        "select penstock.declare_schedule($1, 'every', '3600', now())",
    ),
    "stream name": (lambda app, name: app.stream(name), 100, "select penstock.create_stream($1)"),
}


@pytest.mark.parametrize("what", DECLARATIONS)
async def test_a_name_is_checked_where_it_is_declared_as_in_the_database(sql: Sql, what: str) -> None:
    declare, longest, statement = DECLARATIONS[what]
    app = Penstock("postgresql://nowhere/none")
    for name in [*NAMES, "x" * (longest + 1), *(["job_x"] if what == "job type name" else [])]:
        with pytest.raises(InvalidInput, match=f"invalid {what}") as refused:
            declare(app, name)
        assert "characters" in str(refused.value.hint) or "letters" in str(refused.value.hint)
        if isinstance(name, str) and "\x00" not in name:
            with pytest.raises(asyncpg.PostgresError, match="invalid"):
                await sql.execute(statement, name)
    for name in ["a", "a-b_c.d", "...", "x" * longest]:
        declare(app, name)
        await sql.execute(statement, name)


def test_an_async_rule_is_refused() -> None:
    async def assign(key: str, workers: object) -> int:
        return 0

    with pytest.raises(InvalidInput, match="assign of work must be a plain function"):
        Penstock().pool("work", assign=assign)  # type: ignore[arg-type]


async def test_calls_with_values_of_the_wrong_kind_are_refused(app: Penstock) -> None:
    pool = app.pool("work")
    listed: Any = ["acme"]
    with pytest.raises(InvalidInput, match="wanted standing jobs must be a mapping"):
        await pool.reconcile(listed)
    with pytest.raises(InvalidInput, match="metadata must be a mapping"):
        pool.worker(metadata=listed)
    with pytest.raises(InvalidInput, match="prefetch must be an integer"):
        pool.worker(prefetch=0)
    with pytest.raises(InvalidInput, match="the weight of 'acme' must be an integer"):
        await pool.set_weight("acme", 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, [1, {"x": math.inf}], {"a": None, "b": -math.inf}, {1, 2}, ({"deep": {3}},)])
@pytest.mark.parametrize("type_", [Any, list[int], dict[str, Any], float])
async def test_what_json_cannot_have_is_refused(app: Penstock, value: Any, type_: Any) -> None:
    work = app.job_type("work", type_)
    with pytest.raises(InvalidInput, match="work"):
        await work.enqueue(value)


async def test_null_stays_null(app: Penstock) -> None:
    assert (await app.job_type("work").enqueue({"a": None, "b": [1.5, None]})).outcome is EnqueueOutcome.QUEUED


@pytest.mark.parametrize("priority", [1.5, "1", True, None])
async def test_a_priority_is_an_integer(app: Penstock, priority: Any) -> None:
    with pytest.raises(InvalidInput, match="priority must be an integer"):
        await app.job_type("work").enqueue_many([NewJob(1, priority=priority)])


async def test_a_unique_key_in_a_pool_is_one_of_its_key(app: Penstock, sql: Sql) -> None:
    pool = app.pool("work")
    first = await pool.enqueue("acme", 1, unique="daily")
    other = await pool.enqueue("bolt", 2, unique="daily")
    again = await pool.enqueue("acme", 3, unique="daily")
    assert (other.outcome, again.outcome, again.id) == (EnqueueOutcome.QUEUED, EnqueueOutcome.COALESCED, first.id)
    by_sql = await sql.fetchval("select penstock.enqueue('work', '4', p_key => 'bolt', p_unique_key => 'daily')")
    assert by_sql == other.id
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 2


async def test_a_claim_of_pools_alone_is_refused_with_a_hint(app: Penstock, sql: Sql) -> None:
    await app.pool("work").declare()
    await sql.execute("select penstock.create_job_type('plain')")
    with pytest.raises(asyncpg.PostgresError, match="work is a pool") as raised:
        await sql.fetch("select * from penstock.claim('me', '{work}', 1)")
    assert "claim_keys" in str(raised.value.hint)  # type: ignore[attr-defined]
    assert await sql.fetch("select * from penstock.claim('me', '{work,plain}', 1)") == []


@pytest.mark.parametrize("arguments", [("--json", "show", "work"), ("show", "work", "--json")])
async def test_json_is_asked_for_before_or_behind_the_command(app: Penstock, url: str, arguments: tuple[str, ...]) -> None:
    await app.pool("work").declare()
    ended = penstock(url, "pools", *arguments)
    assert [worker["slots"] for worker in json.loads(ended.stdout)] == [list(range(256))]


@pytest.mark.parametrize(
    ("declare", "message", "hint"),
    [
        (lambda app: app.job("x", max_attemps=3), "x has no option max_attemps (it was given 3)", "max_attempts"),
        (lambda app: app.job_type("x", max_attemps=3), "x has no option max_attemps (it was given 3)", "max_attempts"),
        (lambda app: app.pool("x", slot=3), "pool x has no option slot (it was given 3)", "slots"),
        (lambda app: app.cron("0 4 * * *", max_attemps=3)(print), "has no option max_attemps (it was given 3)", "max_attempts"),
        (lambda app: app.timer(every=timedelta(1), owners="us")(print), "has no option owners (it was given 'us')", "owner"),
        (lambda app: app.topic("x", keep=3), "a topic has no option keep (it was given 3)", "catch_up"),
        (lambda app: app.topic("x").subscriber("y", filtr={}), "x_y has no option filtr (it was given {})", "filter"),
        (lambda app: app.stream("x", partition=3), "stream x has no option partition (it was given 3)", "partitions"),
        (
            lambda app: app.stream("x").consumer(group="y", max_batch=3),
            "a consumer has no option max_batch (it was given 3)",
            "max_batch_size",
        ),
        (lambda app: app.on_leader(names="x"), "a task of the leader has no option names (it was given 'x')", "name"),
        (
            lambda app: app.pool("x").job(max_attempts=3),
            "the handler of pool x has no option max_attempts (it was given 3)",
            "app.pool",
        ),
    ],
)
def test_an_option_that_does_not_exist_is_refused_by_name_and_value_at_each_declaration(
    declare: Callable[[Penstock], Any], message: str, hint: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        declare(Penstock("postgresql://localhost/nowhere"))
    assert message in refused.value.message
    assert hint in (refused.value.hint or "")
