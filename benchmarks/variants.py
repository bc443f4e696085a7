"""The applications that `benchmarks/handlers.py` compares: a handler that does nothing, and the same with one thing more.

python -m benchmarks.variants VARIANT JOBS      a worker process, ends when so many jobs have run
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import psutil
import uvloop

from penstock import Depends, Job, Penstock, Settings
from penstock.cli import worker_metrics
from penstock.core.garbage_collection import collect_seldom
from penstock.core.measuring import measured
from penstock.core.meter import Meter
from penstock.worker import Worker

JOB_TYPE = "work"
BATCH = 500
BUSY_S = 0.001
"""What a job of a usual size takes of the processor, in seconds."""
KEY = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
"""The key of a measurement, which protects nothing."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What differs from the plain handler.

    Attributes:
        title: What the table says.
        declare: Declares the handler, which is to call the function for each job.
        sampled: One in so many jobs has the context of a sampled trace, all others that of one that is not; 0: they have none.
        metrics: Whether the worker measures itself and is scraped once.
    """

    title: str
    declare: Callable[[Penstock, Callable[[], None]], None]
    sampled: int = 0
    metrics: bool = False


class Ran:
    """Counts jobs."""

    def __init__(self) -> None:
        self.jobs = 0
        self.first = 0.0

    def __call__(self) -> None:
        """One more."""
        if self.jobs == 0:
            self.first = time.perf_counter()
        self.jobs += 1


def _plain(app: Penstock, ran: Callable[[], None]) -> None:
    @app.job(JOB_TYPE)
    async def work(job: Job[Any]) -> None:
        ran()


def _busy(app: Penstock, ran: Callable[[], None]) -> None:
    @app.job(JOB_TYPE)
    async def work(job: Job[Any]) -> None:
        until = time.thread_time() + BUSY_S
        while time.thread_time() < until:
            pass
        ran()


def _with_middleware(app: Penstock, ran: Callable[[], None]) -> None:
    @app.middleware
    async def passing(work: Any, call_next: Any) -> Any:
        return await call_next(work)

    _plain(app, ran)


def _with_dependencies(app: Penstock, ran: Callable[[], None]) -> None:
    def settings() -> dict[str, str]:
        return {}

    async def session(settings: Annotated[dict[str, str], Depends(settings)]) -> AsyncIterator[dict[str, str]]:
        yield settings

    @app.job(JOB_TYPE)
    async def work(job: Job[Any], session: Annotated[dict[str, str], Depends(session)]) -> None:
        ran()


def _encrypted(app: Penstock, ran: Callable[[], None]) -> None:
    @app.job(JOB_TYPE, encrypted=True)
    async def work(job: Job[Any]) -> None:
        ran()


def _in_batches(app: Penstock, ran: Callable[[], None]) -> None:
    @app.job(JOB_TYPE, max_batch_size=BATCH)
    async def work(jobs: list[Job[Any]]) -> None:
        for _ in jobs:
            ran()


HANDLERS = {
    "plain": Variant("a handler that does nothing", _plain),
    "same": Variant("the same again", _plain),
    "middleware": Variant("one middleware", _with_middleware),
    "dependencies": Variant("two dependencies, one of them a generator", _with_dependencies),
    "encrypted": Variant("encrypted payloads", _encrypted),
    "batches": Variant(f"a batch handler, of up to {BATCH} jobs", _in_batches),
}
OBSERVED = {
    "off": Variant("no metrics, no traces", _plain),
    "off-again": Variant("the same again", _plain),
    "metrics": Variant("metrics, one scrape", _plain, metrics=True),
    "traces-1": Variant("traces, 1 in 100 sampled", _plain, sampled=100),
    "traces-all": Variant("traces, all sampled", _plain, sampled=1),
}
BUSY = {
    "busy": Variant("no metrics, no traces", _busy),
    "busy-again": Variant("the same again", _busy),
    "busy-metrics": Variant("metrics, one scrape", _busy, metrics=True),
    "busy-traces-1": Variant("traces, 1 in 100 sampled", _busy, sampled=100),
    "busy-traces-all": Variant("traces, all sampled", _busy, sampled=1),
}
VARIANTS = HANDLERS | OBSERVED | BUSY


def application(variant: Variant, ran: Callable[[], None] = lambda: None, *, traces: bool = False) -> Penstock:
    """The application of a variant."""
    app = Penstock(keys=[KEY], settings=Settings(traces=traces))
    variant.declare(app, ran)
    return app


async def work(variant: Variant, expected: int) -> None:
    """Work until `expected` jobs have run, and print what was seen as one line of JSON."""
    ran, own, exported = Ran(), psutil.Process(), 0
    spans = _export() if variant.sampled else None
    app = application(variant, ran, traces=spans is not None)
    working: Worker | None = None
    with (
        measured() if variant.metrics else nullcontext() as meter,
        _endpoint(app, meter, lambda: [working] if working else []) as address,
    ):
        async with app:
            working = await app.worker()
            task = asyncio.create_task(working.run())
            await working.started()
            idle = _used_s(own)
            print("ready", flush=True)
            while ran.jobs < expected and not task.done():
                if address and ran.jobs > expected // 2:
                    await asyncio.to_thread(_scrape, address)
                    address = ""
                await asyncio.sleep(0.005)
            working.stop()
            await task
            # With the results of the last jobs in the database, and the last spans exported.
            seconds = time.perf_counter() - ran.first
    if spans is not None:
        exported = sum(spans)
    print(json.dumps({"seconds": seconds, "cpu_s": _used_s(own) - idle, "exported": exported}))


def _export() -> list[int]:
    """Set a tracer provider with the usual processor, whose exporter drops what it gets. Returns the sizes of its batches."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    sizes: list[int] = []

    class Dropping(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            sizes.append(len(spans))
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Dropping()))
    trace.set_tracer_provider(provider)
    return sizes


def _endpoint(app: Penstock, meter: Meter | None, workers: Callable[[], Sequence[Worker]]) -> AbstractContextManager[str]:
    """The endpoint of `penstock worker --metrics`; its address, or an empty text when nothing is measured."""
    return nullcontext("") if meter is None else _served(app, meter, workers)


@contextmanager
def _served(app: Penstock, meter: Meter, workers: Callable[[], Sequence[Worker]]) -> Iterator[str]:
    with worker_metrics.of_process(app, app.database_url(), ("127.0.0.1", 0), meter, workers) as port:
        yield f"http://127.0.0.1:{port}/metrics"


def _scrape(address: str) -> None:
    with urllib.request.urlopen(address, timeout=60) as answer:
        answer.read()


def _used_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:4]))


if __name__ == "__main__":
    collect_seldom()
    uvloop.run(work(VARIANTS[sys.argv[1]], int(sys.argv[2])))
