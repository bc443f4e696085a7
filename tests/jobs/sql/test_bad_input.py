"""Bad calls: each has its clear error, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import InvalidInput, NewJob, NotFound, Penstock, PenstockError, Settings

Sql: TypeAlias = "asyncpg.Connection[Any]"
GOOD = "'0190b7a0-0000-7000-8000-000000000001'::uuid"

BAD_SQL = [
    ("select penstock.create_job_type(null)", "PS400"),
    ("select penstock.create_job_type('')", "PS400"),
    ("select penstock.create_job_type('a b')", "PS400"),
    ("select penstock.create_job_type('a/b')", "PS400"),
    ("select penstock.create_job_type('job_x')", "PS400"),
    ("select penstock.create_job_type(repeat('x', 201))", "PS400"),
    ("select penstock.create_job_type(E'tab\\there')", "PS400"),
    ("select penstock.create_job_type('ship')", "PS409"),
    ("select penstock.create_job_type('x', null)", "PS400"),
    ("select penstock.create_job_type('x', '[]')", "PS400"),
    ("select penstock.create_job_type('x', '{\"atempts\": 3}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"max_attempts\": 0}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"max_attempts\": -1}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"max_attempts\": 99999}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"max_attempts\": \"many\"}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"max_attempts\": null}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"concurrency\": -1}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"delivery_strategy\": \"exactly_once\"}')", "PS400"),
    ('select penstock.create_job_type(\'x\', \'{"delivery_strategy": "at_most_once", "max_attempts": 2}\')', "PS400"),
    ("select penstock.create_job_type('x', '{\"visibility_timeout\": \"0 s\"}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"visibility_timeout\": \"soon\"}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"visibility_timeout\": \"90 days\"}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"time_limit\": \"-1 s\"}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"backoff_base\": \"-1 s\"}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"backoff_cap\": \"1 s\"}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"backoff_factor\": 0.5}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"backoff_factor\": \"NaN\"}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"backoff_jitter\": 2}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"rate_limit\": 5}')", "PS400"),
    ('select penstock.create_job_type(\'x\', \'{"rate_limit": 0, "rate_period": "1 s"}\')', "PS400"),
    ('select penstock.create_job_type(\'x\', \'{"rate_limit": 5, "rate_period": "1 ms"}\')', "PS400"),
    ("select penstock.change_job_type('none', '{}')", "PS404"),
    ("select penstock.change_job_type('ship', '{\"name\": \"other\"}')", "PS400"),
    ("select penstock.pause('none')", "PS404"),
    ("select penstock.resume('none')", "PS404"),
    ("select penstock.enqueue('none')", "PS404"),
    ("select penstock.enqueue('a b')", "PS400"),
    ("select penstock.enqueue(null)", "PS400"),
    ("select penstock.enqueue('ship', null)", "PS400"),
    ("select penstock.enqueue('ship', to_jsonb(repeat('x', 1100000)))", "PS413"),
    ("select penstock.enqueue('ship', p_key => '')", "PS400"),
    ("select penstock.enqueue('ship', p_key => repeat('k', 256))", "PS400"),
    ("select penstock.enqueue('ship', p_key => E'a\\nb')", "PS400"),
    ("select penstock.enqueue('ship', p_unique_key => '')", "PS400"),
    ("select penstock.enqueue('ship', p_priority => 101)", "PS400"),
    ("select penstock.enqueue('ship', p_priority => -70000)", "PS400"),
    ("select penstock.enqueue('ship', p_priority => null)", "PS400"),
    ("select penstock.enqueue('ship', p_id => 'ffffffff-ffff-7fff-bfff-ffffffffffff')", "PS400"),
    (f"select penstock.enqueue_many('ship', array['{{}}', '{{}}']::jsonb[], array[{GOOD}])", "PS400"),
    (f"select penstock.enqueue_many('ship', array['{{}}', '{{}}']::jsonb[], array[{GOOD}, null])", "PS400"),
    ("select penstock.enqueue_many('ship', array['{}', null]::jsonb[])", "PS400"),
    ("select penstock.enqueue_many('ship', array_fill('{}'::jsonb, array[100001]))", "PS413"),
    ("select penstock.enqueue('ship', p_run_after => 'infinity')", "PS400"),
    ("select penstock.enqueue('ship', p_expires_at => '-infinity')", "PS400"),
    ("select penstock.create_job_type('x', '{\"backoff_cap\": \"3000000 years\"}')", "PS400"),
    ("select penstock.create_job_type('x', '{\"time_limit\": \"31 days\"}')", "PS400"),
    ("select penstock.wait_for_jobs(repeat('w', 55), '{ship}')", "PS400"),
    ("select penstock.wait_for_jobs(null, '{ship}')", "PS400"),
    ("select * from penstock.claim(repeat('w', 55), '{ship}', 1)", "PS400"),
    ("select penstock.enqueue_json('ship', null)", "PS400"),
    ("select penstock.enqueue_json('ship', '{}')", "PS400"),
    ("select penstock.enqueue_json('ship', '[5]')", "PS400"),
    ("select penstock.enqueue_json('ship', '[{\"payload\": 1}]')", "PS400"),
    ("select penstock.enqueue_json('ship', '[{\"id\": \"123\"}]')", "PS400"),
    ("select penstock.enqueue_json('ship', '[{\"run_after\": \"later\"}]')", "PS400"),
    ("select penstock.enqueue_json('ship', '[{\"run_after\": true}]')", "PS400"),
    ("select penstock.enqueue_json('ship', '[{\"expires_at\": 1e300}]')", "PS400"),
    ("select penstock.enqueue_json('ship', '[{\"priority\": \"high\"}]')", "PS400"),
    ("select penstock.claim(null, '{ship}', 1)", "PS400"),
    ("select penstock.claim('', '{ship}', 1)", "PS400"),
    ("select penstock.claim('w', '{ship}', 0)", "PS400"),
    ("select penstock.claim('w', '{ship}', 1000000)", "PS400"),
    (f"select penstock.settle(array[{GOOD}], null)", "PS400"),
    (f"select penstock.settle(array[{GOOD}], '{{1}}', null, '{{done}}')", "PS400"),
    (f"select penstock.settle(array[{GOOD}], '{{1}}', null, array[null])", "PS400"),
    (f"select penstock.extend(array[{GOOD}], '{{1}}', null, '-1 s')", "PS400"),
    (f"select penstock.cancel({GOOD})", "PS404"),
    (f"select penstock.replay({GOOD})", "PS404"),
    ("select penstock.prune('-1 day')", "PS400"),
    ("select penstock.register_worker('', '{}')", "PS400"),
    ("select penstock.register_worker('a b', '{}')", "PS400"),
    ("select penstock.register_worker('w', '{}', p_dead_after => '0 s')", "PS400"),
    ("select penstock.list_jobs(p_status => 'done')", "PS400"),
    ("select penstock.list_jobs(p_limit => 0)", "PS400"),
    ("select penstock.grant_access('nobody_there', 'reader')", "PS404"),
    ("select penstock.revoke_access('nobody_there')", "PS404"),
    ("select penstock.job_rates('0')", "PS400"),
    ("select penstock.job_rates('-1 day')", "PS400"),
    ("select penstock.job_rates('1 year')", "PS400"),
    ("select penstock.forget_keys('pool', '-1 day')", "PS400"),
    ("select penstock.forget_keys('pool', null)", "PS400"),
    ("select penstock.declare_topic(null)", "PS400"),
    ("select penstock.declare_topic('')", "PS400"),
    ("select penstock.declare_topic('a b')", "PS400"),
    ("select penstock.declare_topic(repeat('x', 151))", "PS400"),
    ("select penstock.declare_topic('x', null)", "PS400"),
    ("select penstock.declare_topic('x', '[]')", "PS400"),
    ("select penstock.declare_topic('x', '{\"kep\": 3}')", "PS400"),
    ("select penstock.declare_topic('x', '{\"catch_up\": -1}')", "PS400"),
    ("select penstock.declare_topic('x', '{\"catch_up\": 1.5}')", "PS400"),
    ("select penstock.declare_topic('x', '{\"catch_up\": \"all\"}')", "PS400"),
    ("select penstock.declare_topic('x', '{\"catch_up\": 1e9}')", "PS400"),
    ("select penstock.subscribe(null, 'c')", "PS400"),
    ("select penstock.subscribe('none', 'c')", "PS404"),
    ("select penstock.subscribe('news', null)", "PS400"),
    ("select penstock.subscribe('news', '')", "PS400"),
    ("select penstock.subscribe('news', 'a b')", "PS400"),
    ("select penstock.subscribe('news', 'a/b')", "PS400"),
    ("select penstock.subscribe('news', E'a\\nb')", "PS400"),
    ("select penstock.subscribe('news', repeat('x', 196))", "PS400"),
    ("select penstock.subscribe('job', 'c')", "PS400"),
    ("select penstock.subscribe('news', 'c', p_ttl => '0 s')", "PS400"),
    ("select penstock.subscribe('news', 'c', p_ttl => '90 days')", "PS400"),
    ("select penstock.subscribe('news', 'c', p_since => -1)", "PS400"),
    ("select penstock.subscribe('news', 'c', p_since => 1)", "PS400"),
    ("select penstock.subscribe('news', 'c', p_options => '{\"max_attempts\": 0}')", "PS400"),
    ("select penstock.subscribe('news', 'c', p_options => '[]')", "PS400"),
    ("select penstock.subscribe('news', 'c', p_queue => 'none')", "PS404"),
    ("select penstock.subscribe('news', 'c', p_queue => 'news_bob')", "PS409"),
    ("select penstock.subscribe('news', 'bob', p_queue => 'ship')", "PS409"),
    ("select penstock.subscribe_many('news', '{}')", "PS400"),
    ("select penstock.subscribe_many('news', null)", "PS400"),
    ("select penstock.subscribe_many('news', '{a,a}')", "PS400"),
    ("select penstock.subscribe_many('news', '{a,b}', p_filters => array['{}'::jsonb])", "PS400"),
    ("select penstock.subscribe_many('news', array_fill('a'::text, array[100001]))", "PS400"),
    ("select penstock.unsubscribe('none', 'c')", "PS404"),
    ("select penstock.unsubscribe('a b', 'c')", "PS400"),
    ("select penstock.publish(null)", "PS400"),
    ("select penstock.publish('none')", "PS404"),
    ("select penstock.publish('a b')", "PS400"),
    ("select penstock.publish('news', null)", "PS400"),
    ("select penstock.publish('news', to_jsonb(repeat('x', 1100000)))", "PS413"),
    ("select penstock.publish('news', p_unique_key => '')", "PS400"),
    ("select penstock.publish('news', p_unique_key => repeat('x', 256))", "PS400"),
    ("select penstock.publish_many('none', array['{}']::jsonb[])", "PS404"),
    ("select penstock.publish_many('news', array['{}', null]::jsonb[])", "PS400"),
    (f"select penstock.publish_many('news', array['{{}}', '{{}}']::jsonb[], array[{GOOD}])", "PS400"),
    (f"select penstock.publish_many('news', array['{{}}', '{{}}']::jsonb[], array[{GOOD}, null])", "PS400"),
    (f"select penstock.publish_many('news', array['{{}}', '{{}}']::jsonb[], array[{GOOD}, {GOOD}])", "PS400"),
    ("select penstock.publish_many('news', array_fill('{}'::jsonb, array[10001]))", "PS413"),
    ("select penstock.publish_many('news', array[to_jsonb(repeat('x', 1100000))])", "PS413"),
    ("select penstock.publish_json('news', null)", "PS400"),
    ("select penstock.publish_json('news', '[1]')", "PS400"),
    ("select penstock.publish_json('news', '[{}, {\"dat\": 1}]')", "PS400"),
    ("select penstock.publish_json('news', null)", "PS400"),
    ("select penstock.publish_many('news', array['{}']::jsonb[], null, array['a', 'b'])", "PS400"),
    ("select penstock.publish_many('news', array['{}']::jsonb[], null, array[''])", "PS400"),
    ("select penstock.publish_many('news', array['{}']::jsonb[], null, null, array[now(), now()])", "PS400"),
    ("select penstock.publish_many('news', array['{}']::jsonb[], null, null, null, array[now(), now()])", "PS400"),
    ("select penstock.publish_json('news', '{\"payload\": 1}')", "PS400"),
    ("select penstock.publish_json('news', '{\"id\": \"123\"}')", "PS400"),
    ("select penstock.publish_json('news', '{\"run_after\": true}')", "PS400"),
    ("select penstock.publish_json('news', '{\"unique_key\": \"\"}')", "PS400"),
    ("select penstock.read_topic('none')", "PS404"),
    ("select penstock.read_topic('news', 5)", "PS400"),
    ("select penstock.read_topic('news', -1)", "PS400"),
    ("select penstock.read_topic('news', 0, 0)", "PS400"),
    (f"select penstock.unfinished_copies({GOOD})", "PS404"),
    (f"select penstock.outcomes({GOOD})", "PS404"),
    ("select penstock.prune_messages('-1 day')", "PS400"),
    ("select penstock.grant_access(current_user::name, 'king')", "PS400"),
]


async def snapshot(sql: Sql) -> list[Any]:
    tables = ("jobs", "type_priorities", "queued_jobs", "archived_jobs", "leases", "workers", "rate_windows", "access_grants")
    tables += ("topics", "subscriptions", "topic_messages", "ended_queues")
    return [await sql.fetch(f"select * from penstock.{table} order by 1") for table in tables]


@pytest.fixture
async def with_type(sql: Sql) -> Sql:
    await sql.execute("select penstock.create_job_type('ship')")
    await sql.execute("select penstock.declare_topic('news')")
    await sql.execute("select penstock.subscribe('news', 'bob')")
    return sql


async def test_bad_calls_in_sql_have_a_state_and_a_hint_and_write_nothing(with_type: Sql) -> None:
    sql = with_type
    before = await snapshot(sql)
    wrong = []
    for call, state in BAD_SQL:
        try:
            await sql.execute(call)
        except asyncpg.PostgresError as error:
            if error.sqlstate != state or not error.hint:
                wrong.append(f"{call}: {error.sqlstate} {error} hint {error.hint}")
        else:
            wrong.append(f"{call}: was accepted")
    assert not wrong, "\n".join(wrong)
    assert await snapshot(sql) == before


BAD_PYTHON: list[tuple[Callable[[Penstock], Any], type[PenstockError]]] = [
    (lambda app: app.enqueue("ship", {"f": object()}), InvalidInput),
    (lambda app: app.enqueue("ship", "nul \x00"), InvalidInput),
    (lambda app: app.enqueue("ship", {}, id="123"), InvalidInput),
    (lambda app: app.enqueue("ship", {}, priority=1000), InvalidInput),
    (lambda app: app.enqueue("ship", {}, key=""), InvalidInput),
    (lambda app: app.enqueue("ship", {}, key="a\x00b"), InvalidInput),
    (lambda app: app.enqueue("ship", {}, run_after=datetime(2030, 1, 1)), InvalidInput),
    (lambda app: app.enqueue("ship", {}, connection=object()), InvalidInput),
    (lambda app: app.enqueue("none", {}), NotFound),
    (lambda app: app.enqueue_many("ship", [NewJob({}), NewJob({}, unique="")]), InvalidInput),
    (lambda app: app.find("not an id"), InvalidInput),
    (lambda app: app.find("job_0190b7a0-0000-7000-8000-000000000001"), NotFound),
    (lambda app: app.cancel("0190b7a0-0000-7000-8000-000000000001"), NotFound),
    (lambda app: app.replay("0190b7a0-0000-7000-8000-000000000001"), NotFound),
    (lambda app: app.find_many(status="done"), InvalidInput),
    (lambda app: app.find_many(limit=0), InvalidInput),
    (lambda app: app.find_many(name="nope"), NotFound),
    (lambda app: app.pause("none"), NotFound),
    (lambda app: app.change_job_type("ship", max_attempts=0), InvalidInput),
    (lambda app: app.prune(timedelta(days=-1)), InvalidInput),
    (lambda app: app.worker(), InvalidInput),
    (lambda app: app.worker("ship"), NotFound),
    (lambda app: app.topic("news").publish(object()), InvalidInput),
    (lambda app: app.topic("news").publish("nul \x00"), InvalidInput),
    (lambda app: app.topic("news").publish(1, id="123"), InvalidInput),
    (lambda app: app.topic("news").publish(1, unique="a\x00"), InvalidInput),
    (lambda app: app.topic("news").publish(1, run_after=datetime(2030, 1, 1)), InvalidInput),
    (lambda app: app.topic("news").publish("x" * 1_100_000), InvalidInput),
    (lambda app: app.topic("news").publish(1, connection=object()), InvalidInput),
    (lambda app: app.topic("a b").publish(1), InvalidInput),
    (lambda app: app.topic("news").subscribe("a b"), InvalidInput),
    (lambda app: app.topic("news").subscribe("a\x00b"), InvalidInput),
    (lambda app: app.topic("news").subscribe("c", filter=object()), InvalidInput),
    (lambda app: app.topic("news").subscribe("c", ttl=timedelta(0)), InvalidInput),
    (lambda app: app.topic("news").subscribe("c", since=7), InvalidInput),
    (lambda app: app.topic("news").read(7), InvalidInput),
]


async def test_bad_calls_in_python_have_a_typed_error_and_write_nothing(app: Penstock, with_type: Sql) -> None:
    before = await snapshot(with_type)
    wrong = []
    for place, (call, kind) in enumerate(BAD_PYTHON):
        try:
            await call(app)
        except PenstockError as error:
            if not isinstance(error, kind):
                wrong.append(f"{place}: {error!r}")
        except Exception as error:
            wrong.append(f"{place}: {type(error).__name__} {error}")
        else:
            wrong.append(f"{place}: was accepted")
    assert not wrong, "\n".join(wrong)
    assert await snapshot(with_type) == before


async def test_a_database_that_cannot_be_used_is_a_clear_error_without_the_password() -> None:
    for bad in ("postgresql://u:s3cret@127.0.0.1:1/none", "nonsense://u:s3cret@host"):
        app = Penstock(bad, settings=Settings(connect_timeout=timedelta(seconds=2)))
        with pytest.raises(PenstockError) as caught:
            await app.counts()
        assert "s3cret" not in str(caught.value)
        assert "s3cret" not in repr(app.settings)
