"""Traces through jobs, streams and topics, as an in-memory exporter shows them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler

from penstock import Backoff, Batch, Event, Events, Fail, Job, NewJob, NewMessage, Penstock, Settings, Snooze
from penstock.core.tracing import Tracing
from penstock.testing import TemporaryDatabases, running_worker
from tests.waiting import eventually

SECRET = "s3cret-in-the-payload"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
QUICK = Backoff(base=timedelta(milliseconds=1), cap=timedelta(milliseconds=1))


class Traces:
    """The spans of an application."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(self.provider)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    async def of(self, *names: str) -> list[ReadableSpan]:
        """The spans of these names, in the order in which they began, when there are as many as names."""

        def found() -> list[ReadableSpan]:
            return sorted((span for span in self.spans if span.name in names), key=lambda span: span.start_time or 0)

        await eventually(lambda: len(found()) == len(names))
        return found()

    def tree(self, trace_id: str) -> list[str]:
        """The spans of a trace, each behind its parent and indented by one more."""
        spans = [span for span in self.spans if f"{span.context.trace_id:032x}" == trace_id]
        children: dict[int, list[ReadableSpan]] = {}
        for span in sorted(spans, key=lambda span: span.start_time or 0):
            children.setdefault(span.parent.span_id if span.parent is not None else 0, []).append(span)

        def below(parent: int, depth: int) -> Iterator[str]:
            for span in children.get(parent, []):
                yield "  " * depth + span.name
                yield from below(span.context.span_id, depth + 1)

        return list(below(int(SPAN, 16), 0))


@pytest.fixture(scope="module")
def url(databases: TemporaryDatabases) -> Iterator[str]:
    with databases.database() as url:
        yield url


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
async def app(url: str, traces: Traces) -> AsyncIterator[Penstock]:
    app = Penstock(url, settings=Settings(traces=True))
    app.context.tracing = traces.tracing
    async with app:
        yield app


def id_of(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links_of(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


async def test_an_order_is_one_tree_from_sql_through_jobs_a_stream_and_a_topic(app: Penstock, traces: Traces, sql: Any) -> None:
    orders = app.stream("orders", partitions=2)
    delays = app.topic("delays")
    shipped = asyncio.Event()

    @app.job("accept")
    async def accept(job: Job[Any]) -> None:
        await orders.append({"order": SECRET}, key=SECRET, headers={"note": SECRET})

    @orders.consumer(group="billing")
    async def bill(event: Event[Any]) -> None:
        await delays.publish({"order": SECRET}, unique=SECRET)

    @delays.subscriber("jfk")
    async def tell(job: Job[Any]) -> None:
        await ship.enqueue({"order": SECRET})

    @app.job("ship")
    def ship(job: Job[Any]) -> None:
        # In a thread.
        assert trace.get_current_span().is_recording()
        shipped.set()

    async with running_worker(app):
        async with sql.transaction():
            await sql.execute(f"set local penstock.traceparent = '{SAMPLED}'")
            await sql.execute("select penstock.enqueue('accept', to_jsonb($1::text))", SECRET)
        await asyncio.wait_for(shipped.wait(), 30)
        await traces.of("process ship")
    assert traces.tree(TRACE) == [
        "process accept",
        "  append orders",
        "    process orders",
        "      publish delays",
        "        process delays_jfk",
        "          enqueue ship",
        "            process ship",
    ]
    consumed = next(span for span in traces.spans if span.name == "process orders")
    assert consumed.kind is trace.SpanKind.CONSUMER
    assert (consumed.attributes or {}).items() >= {
        "messaging.system": "penstock",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "billing",
        "penstock.attempt": 1,
    }.items()
    assert SECRET not in "".join(span.to_json() for span in traces.spans)


async def test_a_retry_is_a_trace_of_its_own_with_a_link_and_its_error_is_a_class(app: Penstock, traces: Traces) -> None:
    @app.job("fragile", max_attempts=3, backoff=QUICK)
    async def fragile(job: Job[Any]) -> None:
        if job.attempt == 1:
            raise ValueError(SECRET)
        if job.attempt == 2:
            raise Fail(SECRET)

    async with running_worker(app):
        await fragile.enqueue(SECRET)
        first, second = await traces.of("process fragile", "process fragile")
    (sent,) = await traces.of("enqueue fragile")
    assert parent_of(first) == id_of(sent)
    assert (parent_of(second), links_of(second)) == (None, [id_of(sent)])
    assert second.context.trace_id != sent.context.trace_id
    shown = [
        [(span.attributes or {}).get(name) for name in ("penstock.attempt", "penstock.outcome", "error.type")]
        for span in (first, second)
    ]
    assert shown == [[1, "failed", "ValueError"], [2, "failed-for-good", "Fail"]]
    assert not first.events
    assert SECRET not in "".join(span.to_json() for span in traces.spans)


async def test_a_snoozed_job_stays_in_its_trace(app: Penstock, traces: Traces) -> None:
    @app.job("patient")
    async def patient(job: Job[Any]) -> None:
        if job.snoozes == 0:
            raise Snooze(timedelta(milliseconds=1))

    async with running_worker(app):
        await patient.enqueue(1)
        spans = await traces.of("process patient", "process patient")
    (sent,) = await traces.of("enqueue patient")
    assert [parent_of(span) for span in spans] == [id_of(sent)] * 2
    assert [(span.attributes or {})["penstock.outcome"] for span in spans] == ["snoozed", "succeeded"]


async def test_a_batch_of_one_is_a_child_and_a_larger_one_has_links(app: Penstock, traces: Traces) -> None:
    @app.job("index", max_batch_size=2)
    async def index(jobs: list[Job[Any]]) -> None: ...

    @app.job("single", max_batch_size=2)
    async def single(jobs: list[Job[Any]]) -> None: ...

    await index.enqueue(1)
    await index.enqueue(2)
    async with running_worker(app):
        (both,) = await traces.of("process index")
        await single.enqueue(1)
        (alone,) = await traces.of("process single")
    sent = await traces.of("enqueue index", "enqueue index")
    assert (parent_of(both), sorted(links_of(both))) == (None, sorted(map(id_of, sent)))
    assert (both.attributes or {})["messaging.batch.message_count"] == 2
    assert parent_of(alone) == id_of((await traces.of("enqueue single"))[0])


async def test_batches_of_a_stream_and_iterated_events_are_likewise(app: Penstock, traces: Traces) -> None:
    clicks = app.stream("clicks", partitions=1)
    after = app.job_type("after")

    @clicks.consumer(group="batches", max_batch_size=10)
    async def count(batch: Batch[Any]) -> None: ...

    @clicks.consumer(group="iterated")
    async def iterate(events: Events[Any]) -> None:
        async for event in events:
            await after.enqueue(event.data)

    await clicks.append_many([1, 2])
    async with running_worker(app):
        together, *apart = await traces.of("process clicks", "process clicks", "process clicks")
    spans = [together, *apart]
    (sent,) = await traces.of("append clicks")
    batch = next(span for span in spans if (span.attributes or {})["messaging.consumer.group.name"] == "batches")
    assert (parent_of(batch), links_of(batch)) == (None, [id_of(sent)])
    iterated = [span for span in spans if span is not batch]
    assert [parent_of(span) for span in iterated] == [id_of(sent)] * 2
    assert [parent_of(span) for span in await traces.of("enqueue after", "enqueue after")] == [id_of(span) for span in iterated]


async def test_keyed_jobs_and_blocking_calls_in_threads_are_in_the_tree(app: Penstock, traces: Traces) -> None:
    tenants = app.pool("tenants")

    @tenants.job
    def work(job: Job[Any]) -> None:
        after.sync.enqueue(job.data)

    @app.job("after-work")
    async def after(job: Job[Any]) -> None: ...

    async with running_worker(app):
        await tenants.enqueue("acme", 1)
        await tenants.enqueue("acme", 2)
        ended = await traces.of("process after-work", "process after-work")
    works = {id_of(span): span for span in await traces.of("process tenants", "process tenants")}
    calls = {id_of(span): span for span in await traces.of("enqueue after-work", "enqueue after-work")}
    sent = await traces.of("enqueue tenants", "enqueue tenants")
    assert {parent_of(works[parent_of(calls[parent_of(span)])]) for span in ended} == set(map(id_of, sent))  # type: ignore[index]


async def test_what_is_not_sampled_has_no_span_here_or_behind_it(url: str) -> None:
    traces = Traces(ParentBased(ALWAYS_OFF))
    app = Penstock(url, settings=Settings(traces=True))
    app.context.tracing = traces.tracing
    seen: list[str | None] = []

    @app.job("quiet")
    async def quiet(job: Job[Any]) -> None:
        seen.append(job.traceparent)
        await later.enqueue(1)

    @app.job("later")
    async def later(job: Job[Any]) -> None:
        seen.append(job.traceparent)

    async with app, running_worker(app):
        await quiet.enqueue(1)
        await eventually(lambda: len(seen) == 2)
    assert not traces.spans
    first, second = seen
    assert first is not None and second is not None
    assert first[:36] == second[:36]
    assert (first[-3:], second[-3:]) == ("-00", "-00")


async def test_a_schedule_begins_traces(app: Penstock, traces: Traces) -> None:
    @app.timer(every=timedelta(seconds=1))
    async def tick() -> None: ...

    async with running_worker(app):
        await eventually(lambda: any(span.name == "process tick" for span in traces.spans))
    span = next(span for span in traces.spans if span.name == "process tick")
    assert (parent_of(span), links_of(span)) == (None, [])


async def test_each_way_to_send_gives_the_context(app: Penstock, traces: Traces, sql: Any) -> None:
    plain = app.job_type("plain")
    topic = app.topic("news")
    await topic.subscribe("a")
    with traces.provider.get_tracer("test").start_as_current_span("caller"):
        await plain.enqueue_many([1, NewJob(2, max_attempts=2), NewJob(3, run_after=timedelta(0))])
        await plain.enqueue_many(range(11_000))
        await topic.publish_many([1, NewMessage(2, unique="u")])
        async with sql.transaction():
            await plain.enqueue_many([4, NewJob(5, run_after=timedelta(0))], connection=sql)
            await topic.publish(6, connection=sql)
    found = await sql.fetch(
        "select name, substr(options ->> 'traceparent', 4, 32) as trace, count(*) as jobs from penstock.queued_jobs"
        " where name in ('plain', 'news_a') group by 1, 2 order by 1"
    )
    (caller,) = [span for span in traces.spans if span.name == "caller"]
    trace_id = f"{caller.context.trace_id:032x}"
    assert [tuple(row) for row in found] == [("news_a", trace_id, 3), ("plain", trace_id, 11_005)]


async def test_without_traces_nothing_is_stored_and_a_given_context_reaches_the_handler(url: str, sql: Any) -> None:
    seen: list[str | None] = []
    async with Penstock(url) as app:
        assert app.context.tracing is None

        @app.job("untraced")
        async def untraced(job: Job[Any]) -> None:
            seen.append(job.traceparent)

        with TracerProvider().get_tracer("test").start_as_current_span("caller"):
            await untraced.enqueue(1)
        assert await sql.fetchval("select options from penstock.queued_jobs where name = 'untraced'") is None
        async with running_worker(app):
            await eventually(lambda: len(seen) == 1)
            async with sql.transaction():
                await sql.execute(f"set local penstock.traceparent = '{SAMPLED}'; select penstock.enqueue('untraced', '2')")
            await eventually(lambda: len(seen) == 2)
    assert seen == [None, SAMPLED]


SHOP = """
import json, os
from pathlib import Path
from typing import Any
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from penstock import Job, Penstock

class ToFile(SpanExporter):
    def export(self, spans):
        with open(os.environ["SPANS"], "a") as file:
            for span in spans:
                parent = span.parent and f"{span.parent.span_id:016x}"
                ids = [f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent]
                file.write(json.dumps([span.name, os.getpid(), *ids]) + "\\n")
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(ToFile()))
trace.set_tracer_provider(provider)
app = Penstock()

@app.job("outer", executor="process", max_attempts=1)
def outer(job: Job[Any]) -> None:
    inner.sync.enqueue(job.data)
    provider.force_flush()

@app.job("inner", max_attempts=1)
async def inner(job: Job[Any]) -> None:
    raise ValueError(job.data)
"""


def test_a_trace_goes_through_processes_and_each_line_about_its_job_has_its_id(url: str, tmp_path: Path) -> None:
    (tmp_path / "traced_shop.py").write_text(SHOP)
    spans = tmp_path / "spans"
    environment = {
        **os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_TRACES": "true", "SPANS": str(spans), "PYTHONPATH": str(tmp_path),
    }  # fmt: skip
    worker = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "traced_shop:app", "--log", "json"],
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert worker.stdout is not None
    try:
        sent = f"import traced_shop; traced_shop.outer.sync.enqueue({SECRET!r}); traced_shop.app.sync.close()"
        subprocess.run([sys.executable, "-c", sent], env=environment, cwd=tmp_path, check=True, timeout=60)
        lines = []
        for line in worker.stdout:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "job_failed":
                break
    finally:
        worker.terminate()
        worker.communicate(timeout=60)
    found = {name: rest for name, *rest in map(json.loads, spans.read_text().splitlines())}
    by_id = {span_id: name for name, (_, _, span_id, _) in found.items()}
    parents = {name: by_id.get(parent) for name, (_, _, _, parent) in found.items()}
    assert parents == {
        "enqueue outer": None,
        "process outer": "enqueue outer",
        "enqueue inner": "process outer",
        "process inner": "enqueue inner",
    }
    assert len({pid for pid, *_ in found.values()}) == 3  # the producer, the worker and its child
    (trace_id,) = {trace_id for _, trace_id, _, _ in found.values()}
    assert (lines[-1]["trace_id"], lines[-1]["error_type"]) == (trace_id, "ValueError")
    assert SECRET not in spans.read_text()
    assert SECRET not in json.dumps(lines)
