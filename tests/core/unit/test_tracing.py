"""Trace contexts as text, and spans under each kind of sampler and provider."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased

from penstock.core.tracing import Tracing, trace_id_of, valid_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"

TEXTS: list[tuple[object, str | None]] = [
    (SAMPLED, SAMPLED),
    (UNSAMPLED, UNSAMPLED),
    (f"00-{TRACE}-{SPAN}-ff", f"00-{TRACE}-{SPAN}-ff"),
    # A later version may have more behind the flags; the part that is known counts.
    (f"01-{TRACE}-{SPAN}-01", SAMPLED),
    (f"cc-{TRACE}-{SPAN}-01-what-comes", SAMPLED),
    (f"cc-{TRACE}-{SPAN}-01.what", None),
    (f"00-{TRACE}-{SPAN}-01-more", None),
    (f"ff-{TRACE}-{SPAN}-01", None),
    (f"00-{'0' * 32}-{SPAN}-01", None),
    (f"00-{TRACE}-{'0' * 16}-01", None),
    (f"00-{TRACE.upper()}-{SPAN}-01", None),
    (f"00-{TRACE}-{SPAN}-1", None),
    (f"00-{TRACE}-{SPAN}", None),
    (f" {SAMPLED}", None),
    (f"{SAMPLED}\n", None),
    ("", None),
    ("00-x", None),
    ("x" * 10_000, None),
    ("\x00", None),
    ("\ud800", None),
    (None, None),
    (17, None),
    ({"traceparent": SAMPLED}, None),
    (SAMPLED.encode(), None),
]


@pytest.mark.parametrize(("given", "valid"), TEXTS)
def test_only_a_valid_traceparent_counts(given: object, valid: str | None) -> None:
    assert valid_traceparent(given) == valid
    assert trace_id_of(valid_traceparent(given)) == (None if valid is None else TRACE)


class Traces:
    """Tracing with a sampler, and the spans that were exported."""

    def __init__(self, sampler: Sampler) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]


def test_a_call_that_sends_gives_the_context_of_its_span() -> None:
    traces = Traces(ALWAYS_ON)
    with traces.tracing.sending("enqueue", "ship", 3) as traceparent:
        assert trace.get_current_span().is_recording()
    (span,) = traces.exporter.get_finished_spans()
    assert traceparent == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"
    assert (span.name, span.kind) == ("enqueue ship", trace.SpanKind.PRODUCER)
    assert dict(span.attributes or {}) == {
        "messaging.system": "penstock",
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "send",
        "messaging.destination.name": "ship",
        "messaging.batch.message_count": 3,
    }


def test_without_a_provider_there_is_no_context_and_no_failure() -> None:
    tracing = Tracing(trace.NoOpTracerProvider())
    with tracing.sending("enqueue", "ship", 1) as traceparent:
        assert traceparent is None
    with tracing.processing("ship", [None], 1, {}):
        pass
    assert not tracing.is_skipped(None)


@pytest.mark.parametrize(
    ("sampler", "given", "skipped"),
    [
        (ParentBased(ALWAYS_ON), UNSAMPLED, True),
        (ParentBased(TraceIdRatioBased(0.5)), UNSAMPLED, True),
        (ParentBased(ALWAYS_ON), SAMPLED, False),
        (ParentBased(ALWAYS_ON), None, False),
        (ParentBased(ALWAYS_ON), "00-nonsense", False),
        # These do not follow the producer, so that they have to be asked.
        (ParentBased(ALWAYS_ON, remote_parent_not_sampled=ALWAYS_ON), UNSAMPLED, False),
        (ALWAYS_ON, UNSAMPLED, False),
        (ALWAYS_OFF, UNSAMPLED, False),
    ],
)
def test_a_handler_whose_producer_is_not_sampled_has_no_span_where_the_sampler_follows_the_producer(
    sampler: Sampler, given: str | None, skipped: bool
) -> None:
    traces = Traces(sampler)
    assert traces.tracing.is_skipped(given) == skipped
    if skipped:
        # What the handler sends belongs to the same trace, and is not sampled either.
        with traces.tracing.sending("enqueue", "ship", 1) as traceparent:
            pass
        assert traceparent is not None
        assert (traceparent[:36], traceparent[-3:]) == (f"00-{TRACE}-", "-00")
        assert traces.names == []
    traces.tracing.leave()


@pytest.mark.parametrize(
    ("given", "attempt", "parent", "links"),
    [
        ([SAMPLED], 1, True, 0),
        ([SAMPLED], 2, False, 1),
        ([None], 1, False, 0),
        ([SAMPLED, SAMPLED, None], 1, False, 1),
        ([f"00-{number:032x}-{SPAN}-01" for number in range(1, 301)], 1, False, 128),
    ],
)
def test_one_first_attempt_is_a_child_and_all_else_has_links(
    given: list[str | None], attempt: int, parent: bool, links: int
) -> None:
    traces = Traces(ALWAYS_ON)
    with traces.tracing.processing("ship", given, attempt, {}):
        pass
    (span,) = traces.exporter.get_finished_spans()
    assert (span.parent is not None, len(span.links)) == (parent, links)
    assert (f"{span.context.trace_id:032x}" == TRACE) == parent


def test_an_error_is_named_by_its_class_and_says_nothing_else() -> None:
    traces = Traces(ALWAYS_ON)
    with pytest.raises(ValueError, match="s3cret"), traces.tracing.processing("ship", [None], 1, {}):
        raise ValueError("s3cret")
    with pytest.raises(LookupError), traces.tracing.sending("enqueue", "ship", 1):
        raise LookupError("s3cret")
    spans = traces.exporter.get_finished_spans()
    assert [(span.attributes or {})["error.type"] for span in spans] == ["ValueError", "LookupError"]
    assert [span.status.status_code for span in spans] == [trace.StatusCode.ERROR] * 2
    assert "s3cret" not in "".join(span.to_json() for span in spans)


class Broken(SpanProcessor):
    """A processor that raises."""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise RuntimeError("at the start")

    def on_end(self, span: Any) -> None:
        raise RuntimeError("at the end")


def test_a_provider_that_fails_stops_nothing() -> None:
    provider = TracerProvider()
    provider.add_span_processor(Broken())
    with Tracing(provider).processing("ship", [SAMPLED], 1, {}):
        ran = True
    assert ran
