"""An idle system costs a PostgreSQL as `initdb` makes it little: few statements, cheap plans, and nothing is compiled."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeAlias

import asyncpg
import pytest

from benchmarks.idle import SYSTEMS, System, running
from tests.debian import postgres_bin_dir
from tests.stock_server import Kind, StockServer, serving
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
STATEMENTS_A_SECOND = 5
"""Of each worker and server."""
COST_A_SECOND = 4_000
"""Of each, as the planner estimates it; what it costs to look at each stream or type comes on top."""
COST_OF_A_STREAM, COST_OF_A_TYPE = 30, 60
COMPILED_ABOVE = 100_000
"""PostgreSQL's jit_above_cost."""
WINDOW = "6 seconds"

# What an idle worker, scheduler, server or page of the dashboard calls, and what a pool, consumer or topic adds.
CALLS = """
    due_work()
    promote()
    recover()
    expire()
    resolve_workflows()
    resolve_workflows(p_if_due => true)
    advance_operation()
    maintain_topics()
    streams_to_maintain()
    maintain_stream('events')
    drop_retired()
    prune_due()
    prune_staged()
    prune_messages_due()
    prune_history_due()
    register_worker('w', '{mail}')
    heartbeat('w')
    keep_alive('w', '{}', '{}', '{}')
    wait_for_jobs('w', '{mail}')
    wait_for_places('w', '{mail,limited}')
    claim('w', '{mail,limited}', 10)
    has_isolated_jobs('{mail}')
    next_alone('{mail}')
    missing_keys('{mail}', '{}')
    note_schedules('{nightly}')
    wait_for_slots('work', 'w')
    wait_for_events('events', 'penstock_w')
    evict('work')
    read_chunks('events', '{0,1}', '{0,0}')
    bounds_of_streams('{events}')
    group_lag('events')
    top('types')
    top('keys')
    stream_lags()
    lake_lags()
    database_gauges()
    load_of_types()
    job_counts()
    topic_counts()
    worker_list()
    handler_list()
    leader_list()
    schedule_list()
    group_list()
    recent_failures()
    failure_groups()
    rates_of()
    type_rates()
    stuck_dependencies()
    list_jobs()
    search_waiting('{}')
    search_finished('{}')
    restored()
"""


@pytest.fixture(scope="module")
def stock() -> Iterator[StockServer]:
    bin_dir = postgres_bin_dir()
    if bin_dir is None:
        pytest.skip("needs postgresql of Debian")
    settings = {
        "shared_preload_libraries": "auto_explain,pg_stat_statements",
        "auto_explain.log_nested_statements": "on",
        "auto_explain.log_format": "json",
    }
    with serving(Kind(settings=settings), bin_dir) as server:
        yield server


@pytest.fixture
async def admin(stock: StockServer) -> AsyncIterator[Sql]:
    connection = await asyncpg.connect(stock.url)
    yield connection
    await connection.close()


def plans_in(text: str) -> list[dict[str, Any]]:
    """The plans in a log or message of auto_explain."""
    found = []
    for after in re.split(r"duration: [0-9.]+ ms  plan:\s*", text)[1:]:
        plan, _ = json.JSONDecoder().raw_decode(after)
        # asyncpg looks types up, with JIT off.
        if "typeinfo_tree" not in plan["Query Text"]:
            found.append(plan)
    return found


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
async def test_an_idle_system_sends_few_statements_and_cheap_ones(stock: StockServer, admin: Sql, system: System) -> None:
    await admin.execute("create extension if not exists pg_stat_statements")
    async with running(stock.url, system):
        await admin.execute("alter system set auto_explain.log_min_duration = 0")
        await admin.execute("select pg_reload_conf()")
        size = stock.log.stat().st_size
        await admin.execute("select pg_stat_statements_reset()")
        began = await admin.fetchval("select clock_timestamp()")
        # By the clock of the database: what a slow machine sends late counts less, never more.
        await eventually(
            lambda: admin.fetchval(f"select clock_timestamp() > $1::timestamptz + interval '{WINDOW}'", began), "the window", 300
        )
        statements = await admin.fetch(
            "select calls, query from pg_stat_statements where query not similar to '%(pg_|clock_timestamp)%' order by calls desc"
        )
        seconds = (await admin.fetchval("select clock_timestamp()") - began).total_seconds()
        await admin.execute("alter system reset auto_explain.log_min_duration")
        await admin.execute("select pg_reload_conf()")
        with stock.log.open() as log:
            log.seek(size)
            plans = [plan for plan in plans_in(log.read()) if not re.search("pg_|clock_timestamp", plan["Query Text"][:60])]
    processes = system.workers + system.servers
    assert statements and plans
    shown = [(row["calls"], row["query"][:80]) for row in statements]
    assert sum(row["calls"] for row in statements) / seconds <= STATEMENTS_A_SECOND * processes, shown
    dear = [(plan["Plan"]["Total Cost"], plan["Query Text"]) for plan in plans if plan["Plan"]["Total Cost"] >= COMPILED_ABOVE]
    assert dear == []
    cost = sum(plan["Plan"]["Total Cost"] for plan in plans) / seconds
    assert cost <= processes * (COST_A_SECOND + COST_OF_A_STREAM * system.streams + COST_OF_A_TYPE * system.types), shown


async def test_nothing_that_is_called_in_loops_is_compiled_even_where_everything_is(stock: StockServer, admin: Sql) -> None:
    async with running(stock.url, System("none", workers=0, servers=0)):
        await admin.execute(
            """
            select penstock.create_job_type('mail');
            select penstock.create_job_type('limited', '{"concurrency": 1}');
            select penstock.declare_pool('work', '{}');
            select penstock.declare_stream('events');
            select penstock.declare_topic('news');
            """
        )
        messages: list[str] = []
        admin.add_log_listener(lambda _, message: messages.append(str(message.message)))
        for setting in ("jit_above_cost = 0", "jit_inline_above_cost = 0", "jit_optimize_above_cost = 0"):
            await admin.execute(f"set {setting}")
        await admin.execute("set auto_explain.log_min_duration = 0; set client_min_messages = log")
        compiled, looked = [], 0
        for call in [line.strip() for line in CALLS.strip().splitlines()]:
            # The statement of the caller is the caller's own.
            own = f"select from penstock.{call}"
            messages.clear()
            try:
                await admin.execute(own)
            except asyncpg.PostgresError as error:
                assert error.sqlstate.startswith("PS"), f"{call}: {error}"
            for message in messages:
                for plan in plans_in(message):
                    looked += 1
                    if "JIT" in plan and plan["Query Text"] != own:
                        compiled.append((call, plan["Query Text"]))
        assert looked > 100
        assert compiled == []
