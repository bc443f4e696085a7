"""Workers say what their handlers are: payloads, documentation, owner."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from penstock import Event, HandlerRecord, InvalidInput, Job, Penstock, Tick

URL = "https://wiki.example/shop"


class Order(BaseModel):
    total: int


def declare(app: Penstock) -> None:
    documented: dict[str, Any] = {"docs_url": URL, "owner": "shop"}

    @app.job(**documented)
    async def bill(order: Order) -> None: ...

    @app.job
    async def plain(job: Job[Any]) -> None: ...

    @app.pool("accounts", payload=Order, **documented).job
    async def book(job: Job[Order]) -> None: ...

    @app.topic("orders", payload=Order).subscriber("audit", **documented)
    async def audit(job: Job[Order]) -> None: ...

    @app.stream("clicks", Order, partitions=1).consumer(group="count", **documented)
    async def count(event: Event[Order]) -> None: ...

    @app.timer(every=timedelta(hours=1), **documented)
    async def tidy(tick: Tick) -> None: ...

    @app.timer(every=timedelta(hours=1), as_job=False, **documented)
    async def sweep(tick: Tick) -> None: ...


async def test_a_worker_says_what_its_handlers_are(app: Penstock) -> None:
    declare(app)
    await app.worker()
    said = {(record.kind, record.name): record for record in await app.handlers()}
    assert set(said) == {
        ("job", "bill"), ("job", "plain"), ("pool", "accounts"), ("subscriber", "orders_audit"), ("consumer", "clicks/count"),
        ("schedule", "tidy"), ("schedule", "sweep"),
    }  # fmt: skip
    for what, record in said.items():
        if what != ("job", "plain"):
            assert (record.docs_url, record.owner) == (URL, "shop"), what
        assert record.noted_at is not None
    for what in (("job", "bill"), ("pool", "accounts"), ("subscriber", "orders_audit"), ("consumer", "clicks/count")):
        schema = said[what].schema
        assert schema is not None and schema["properties"]["total"]["type"] == "integer", what
    assert said["job", "plain"] == HandlerRecord("job", "plain", noted_at=said["job", "plain"].noted_at)


async def test_a_worker_of_a_new_version_replaces_what_was_said(app: Penstock, url: str) -> None:
    declare(app)
    await app.worker()
    async with Penstock(url) as newer:

        @newer.job(owner="billing")
        async def bill(total: int, currency: str) -> None: ...

        await newer.worker()
        [record] = [record for record in await newer.handlers() if record.name == "bill"]
    assert record.owner == "billing" and record.docs_url is None
    assert record.schema is not None and set(record.schema["properties"]) == {"total", "currency"}


@pytest.mark.parametrize("given", [{"docs_url": "javascript:alert(1)"}, {"docs_url": ""}, {"owner": "a\nb"}, {"owner": 7}])
def test_what_people_cannot_use_is_refused(given: dict[str, Any]) -> None:
    app = Penstock("postgresql://nowhere")
    with pytest.raises(InvalidInput, match=next(iter(given))):

        @app.job(**given)
        async def bill(order: Order) -> None: ...

    with pytest.raises(InvalidInput, match=next(iter(given))):
        app.stream("clicks").consumer(group="count", **given)


async def test_sql_keeps_no_script_and_no_large_schema(sql: Any, app: Penstock) -> None:
    said = [
        {"kind": "job", "name": "a", "docs_url": "javascript:alert(1)", "schema": {"x": [f"{n:x}" * 9 for n in range(30_000)]}}
    ]
    await sql.fetch("select penstock.note_handlers($1::jsonb)", json.dumps(said))
    [record] = await app.handlers()
    assert record.docs_url is None and record.schema is None
