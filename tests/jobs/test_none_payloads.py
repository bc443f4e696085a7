"""None as a payload: itself where the type of the payload has it, and an empty object elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import InvalidInput, Job, Penstock
from penstock.core.serialization import load_json
from penstock.testing import running_worker

NOT_GIVEN = object()


async def stored(app: Penstock, name: str) -> list[Any]:
    rows = await (await app.database()).fetch(
        "select data::text as data from penstock.queued_jobs where name = $1 order by seq", name
    )
    return [load_json(row["data"]) for row in rows]


async def test_none_is_the_payload_of_a_type_that_has_it_in_every_call(app: Penstock) -> None:
    @app.job
    async def number(job: Job[int | None]) -> None: ...

    @app.job
    async def document(job: Job[dict[str, int] | None]) -> None: ...

    @app.job
    async def anything(job: Job[Any]) -> None: ...

    pool = app.pool("paint", int | None)
    topic = app.topic("news", int | None)
    await app.open()
    for declared in (number, document):
        await declared.enqueue(None)
        await declared.enqueue()
        await declared.options(priority=0).enqueue(None)
        await declared.enqueue_many([declared.new(None)])
        await app.enqueue(declared, None)
        await app.enqueue(declared)
        assert await stored(app, declared.name) == [None] * 6
    await pool.enqueue("k", None)
    await pool.enqueue("k", 5)
    assert await stored(app, "paint") == [None, 5]
    await topic.subscribe("reader")
    await topic.publish(None)
    assert await stored(app, "news_reader") == [None]
    # Of any JSON, None still says that there is no payload.
    await anything.enqueue(None)
    await anything.enqueue()
    await app.enqueue("anything", None)
    assert await stored(app, "anything") == [{}] * 3
    with pytest.raises(InvalidInput):
        await number.enqueue_many([{}])  # type: ignore[list-item]


async def test_a_handler_gets_the_none_that_was_sent(app: Penstock) -> None:
    found: list[Any] = []

    @app.job
    async def number(job: Job[int | None]) -> None:
        found.append(job.data)

    await app.open()
    await number.enqueue(None)
    await number.enqueue(3)
    async with running_worker(app):
        await app.wait((await number.enqueue(None)).id)
    assert sorted(found, key=str) == [3, None, None]
