"""What a name stands for, a plain job type, a pool or a subscriber's queue, is decided once; only an administrator changes it."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock
from tests.postgres.sql_roles import prepare
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def _is_pool(sql: Sql, name: str) -> bool:
    return bool(await sql.fetchval("select exists (select from penstock.pools where name = $1)", name))


async def _refusal(sql: Sql, call: str) -> tuple[str, str]:
    with pytest.raises(asyncpg.PostgresError) as raised:
        await sql.execute(call)
    return raised.value.sqlstate, str(raised.value)  # type: ignore[attr-defined]


async def test_a_worker_makes_no_pool_of_a_type_that_is_there(app: Penstock, sql: Sql) -> None:
    await prepare(sql)
    await sql.execute("select penstock.create_job_type('good'); select penstock.enqueue('good', '1')")
    await sql.execute("set role test_worker")
    state, said = await _refusal(sql, "select penstock.declare_pool('good', '{}', '{\"max_attempts\": 1}')")
    assert state == "PS409"
    assert "good is a plain job type" in said
    assert (await _refusal(sql, "select penstock.convert_to_pool('good')"))[0] == "42501"
    await sql.execute("select penstock.enqueue('good', '2')")
    await sql.execute("set role test_admin")
    # What was refused has changed nothing.
    assert await sql.fetchval("select max_attempts from penstock.jobs where name = 'good'") == 5
    await sql.execute("select penstock.convert_to_pool('good', '{\"slots\": 4}')")
    assert await _is_pool(sql, "good")
    assert (await _refusal(sql, "select penstock.convert_to_pool('good')"))[0] == "PS409"
    assert (await _refusal(sql, "select penstock.convert_to_pool('none')"))[0] == "PS404"
    await sql.execute("set role test_worker")
    await sql.execute("select penstock.declare_pool('good', '{\"slots\": 4}')")


async def test_a_declaration_keeps_the_kind_of_everything(app: Penstock, sql: Sql) -> None:
    """Every declaration, of every name that is there: afterwards each name is what it was."""
    await sql.execute(
        """
        select penstock.create_job_type('plain');
        select penstock.declare_pool('pool', '{"slots": 4}');
        select penstock.create_stream('stream', 2);
        select penstock.declare_consumer_group('stream', 'group');
        select penstock.declare_topic('topic');
        select penstock.subscribe('topic', 'client');
        """
    )
    kinds = """
        select name, 'type' || coalesce(topic, '') as kind from penstock.jobs
        union all select name, 'pool' from penstock.pools
        union all select name, 'stream ' || format || partitions from penstock.streams
        union all select name, 'topic' from penstock.topics
        union all select name, 'group ' || slots || (assignor = 'custom') from penstock.groups
        order by 1, 2
    """
    before = {tuple(row) for row in await sql.fetch(kinds)}
    names = ["plain", "pool", "stream", "topic", "topic_client", "stream/group"]
    declarations = [
        "select penstock.declare_job_type('{}', '{{\"max_attempts\": 7}}')",
        "select penstock.declare_pool('{}', '{{\"slots\": 2}}')",
        "select penstock.declare_pool('{}', '{{\"assignor\": \"custom\"}}')",
        "select penstock.declare_topic('{}', '{{\"catch_up\": 1}}')",
        "select penstock.declare_stream('{}', 3, '{{\"format\": \"bytes\"}}')",
        "select penstock.declare_group('{}', 8)",
        "select penstock.declare_group('{}', 8, 'custom')",
    ]
    for name in names:
        for declaration in declarations:
            transaction = sql.transaction()
            await transaction.start()
            try:
                await sql.execute(declaration.format(name))
            except asyncpg.PostgresError as error:
                assert error.sqlstate in ("PS400", "PS404", "PS409"), (declaration, name, str(error))  # type: ignore[attr-defined]
            else:
                after = {tuple(row) for row in await sql.fetch(kinds)}
                assert before <= after, (declaration, name, before - after)
                if name in ("plain", "topic_client"):
                    assert not await _is_pool(sql, name), declaration
            finally:
                await transaction.rollback()


async def test_the_first_of_two_declarations_decides(app: Penstock, sql: Sql, url: str) -> None:
    other = await asyncpg.connect(url)
    try:
        async with sql.transaction():
            await sql.execute("select penstock.create_job_type('work')")
            declared = asyncio.create_task(other.execute("select penstock.declare_pool('work')"))
            waits = "select exists (select from pg_locks where not granted and pid = $1)"
            pid = other.get_server_pid()
            assert await eventually(lambda: sql.fetchval(waits, pid), "the declaration of the pool waits")
        with pytest.raises(asyncpg.PostgresError, match="plain job type"):
            await declared
        assert not await _is_pool(sql, "work")
    finally:
        await other.close()
