"""Traces: OpenTelemetry's spans of what produces and what handles jobs, events and messages, and the trace context between them.

The context travels as text, the `traceparent` of W3C Trace Context: with the options of a job, in the headers of an event, in the
header of an HTTP request, or as the setting `penstock.traceparent` of a transaction. Text that is not valid is ignored.

An application without `Settings.traces` has no `Tracing`, and pays for one check in each call that enqueues and in each worker.
With it, the spans follow the messaging conventions: the first attempt of one job or event is a child of its producer's span. A
further attempt, and a batch of several, begin a trace of their own with links, since a trace that goes on for days, or that
belongs to a thousand producers, shows nothing. A span has names, numbers and ids: no payload, key, or message of an exception.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock._version import __version__
from penstock.core.extras import needs
from penstock.core.logs import get_logger

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, TracerProvider

log = get_logger("penstock.traces")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", re.DOTALL)
_LENGTH = 55
_MOST_LINKS = 128
_EVEN = "02468ace"
_UNSAMPLED_PARENTS_ARE_DROPPED = re.compile(r"^ParentBased\{.*remoteParentNotSampled:AlwaysOffSampler\b")
_FLUSHES_WITHIN_MS = 5_000


def valid_traceparent(text: object) -> str | None:
    """The traceparent in a text, as this version of the format writes it; None: it has none."""
    if not isinstance(text, str) or (found := _TRACEPARENT.fullmatch(text)) is None:
        return None
    if text.startswith("00") and found[1] is not None:
        return None
    return f"00{text[2:_LENGTH]}"


def trace_id_of(traceparent: str | None) -> str | None:
    """The id of the trace of a valid traceparent."""
    return None if traceparent is None else traceparent[3:35]


def sending(tracing: Tracing | None, operation: str, destination: str, count: int) -> AbstractContextManager[str | None]:
    """See `Tracing.sending`. Without tracing there is no span, and no traceparent."""
    return nullcontext() if tracing is None else tracing.sending(operation, destination, count)


class Tracing:
    """The spans of an application.

    Args:
        provider: Tracer provider; None: that of the process, also when it is set later.

    Raises:
        MissingExtra: OpenTelemetry is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        with needs("otel", "tracing (Settings.traces)"):
            from opentelemetry import context, trace
        self._context, self._trace = context, trace
        self._provider = trace.get_tracer_provider if provider is None else lambda: provider
        # Of the process: a tracer that turns to its provider once there is one.
        self._tracer = trace.get_tracer("penstock", __version__, provider)
        self._span_context_of = lru_cache(1_024)(self._parse)
        self._drops_unsampled: bool | None = None
        # Where a context keeps the current span.
        (self._span_key,) = trace.set_span_in_context(trace.INVALID_SPAN, context.Context())
        parse = self._span_context_of

        class Unsampled(trace.NonRecordingSpan):
            """The span of a producer that is not sampled. Its context is made for a handler that asks for it, as few do."""

            __slots__ = ("_traceparent",)

            def __init__(self, traceparent: str) -> None:
                self._traceparent = traceparent

            def get_span_context(self) -> SpanContext:
                return parse(self._traceparent) or trace.INVALID_SPAN_CONTEXT

            def __repr__(self) -> str:
                return f"Unsampled({self._traceparent})"

        self._unsampled_span = Unsampled

    @contextmanager
    def sending(self, operation: str, destination: str, count: int) -> Iterator[str | None]:
        """The span of a call that writes jobs, events or messages. Yields the traceparent for them; None: there is no provider.

        Args:
            operation: Name of the operation: "enqueue", "append", "publish".
            destination: Name of the job type, stream or topic.
            count: Number of jobs, events or messages.
        """
        attributes = self._attributes(operation, "send", destination, count, {})
        span = self._start(f"{operation} {destination}", None, self._trace.SpanKind.PRODUCER, attributes)
        try:
            with self._trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield self.traceparent_of(span)
        except BaseException as error:
            self.end(span, type(error).__qualname__)
            raise
        self.end(span)

    def is_skipped(self, traceparent: str | None) -> bool:
        """Take over the context of a producer that is not sampled, when the sampler of this process follows the producer's.

        No span is made then, which costs many times as much as this check. It reads the last digit alone, that of the flags: what
        the database hands out is valid.
        """
        if (
            traceparent is None
            or len(traceparent) != _LENGTH
            or traceparent[-1] not in _EVEN
            or not (self._drops_unsampled or self._follows_producers())
        ):
            return False
        self._context.attach(self._context.Context({self._span_key: self._unsampled_span(traceparent)}))
        return True

    def start_processing(
        self,
        destination: str,
        traceparents: Sequence[str | None],
        attempt: int,
        attributes: Mapping[str, Any],
    ) -> Span:
        """Start the span of a handler.

        Args:
            destination: Name of the job type or stream.
            traceparents: Of each job or event that the handler gets.
            attempt: Number of the attempt; of several jobs it does not count.
            attributes: Further attributes.
        """
        count = len(traceparents)
        parents = list(filter(None, map(self._span_context_of, dict.fromkeys(filter(None, traceparents)))))
        context: TraceContext = self._context.Context()
        links: list[Link] = []
        if count == 1 and attempt == 1 and parents:
            context = self._trace.set_span_in_context(self._trace.NonRecordingSpan(parents[0]), context)
        else:
            links = [self._trace.Link(parent) for parent in parents[:_MOST_LINKS]]
        return self._start(
            f"process {destination}",
            context,
            self._trace.SpanKind.CONSUMER,
            self._attributes("process", "process", destination, count, attributes),
            links,
        )

    def enter(self, span: Span) -> None:
        """Make a span the current one of this task, and the root of everything in its context. A task that ends needs no more."""
        self._context.attach(self._trace.set_span_in_context(span, self._context.Context()))

    def leave(self) -> None:
        """Leave the span that `enter` made the current one of this task."""
        self._context.attach(self._context.Context())

    @contextmanager
    def processing(
        self, destination: str, traceparents: Sequence[str | None], attempt: int, attributes: Mapping[str, Any]
    ) -> Iterator[None]:
        """The span of a handler that is called within. See `start_processing`."""
        span = self.start_processing(destination, traceparents, attempt, attributes)
        token = self._context.attach(self._trace.set_span_in_context(span, self._context.Context()))
        try:
            yield
        except BaseException as error:
            self.end(span, type(error).__qualname__)
            raise
        else:
            self.end(span)
        finally:
            self._context.detach(token)

    @contextmanager
    def within(self, traceparent: str | None) -> Iterator[None]:
        """Make the span of another process the current one within."""
        parent = None if traceparent is None else self._span_context_of(traceparent)
        if parent is None:
            yield
            return
        span = self._trace.NonRecordingSpan(parent)
        token = self._context.attach(self._trace.set_span_in_context(span, self._context.Context()))
        try:
            yield
        finally:
            self._context.detach(token)

    def end(self, span: Span, error: str | None = None, outcome: str | None = None) -> None:
        """End a span.

        Args:
            span: The span.
            error: Class of the error; None: there was none. Its message may hold a payload, and is left out.
            outcome: What became of the attempt.
        """
        try:
            if span.is_recording():
                if outcome is not None:
                    span.set_attribute("penstock.outcome", outcome)
                if error is not None:
                    span.set_attribute("error.type", error)
                    span.set_status(self._trace.StatusCode.ERROR)
            span.end()
        except Exception as failure:
            log.warning("span_not_ended", error=failure)

    def traceparent_of(self, span: Span) -> str | None:
        """The traceparent of a span; None: there is no provider, so that it is none."""
        context = span.get_span_context()
        if not context.is_valid:
            return None
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"

    @property
    def has_provider(self) -> bool:
        """Whether there is a tracer provider, without which no span is made."""
        return not isinstance(self._provider(), self._trace.ProxyTracerProvider)

    @asynccontextmanager
    async def exporting(self) -> AsyncIterator[None]:
        """Run a worker within: at its end the spans that wait are exported, since a process may end without its exit handlers."""
        if not self.has_provider:
            log.warning(
                "no_tracer_provider", hint="Set one when the application is imported, or start with opentelemetry-instrument."
            )
        try:
            yield
        finally:
            await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        force_flush = getattr(self._provider(), "force_flush", None)
        if force_flush is not None:
            force_flush(_FLUSHES_WITHIN_MS)

    def _start(
        self,
        name: str,
        context: TraceContext | None,
        kind: SpanKind,
        attributes: Mapping[str, Any],
        links: Sequence[Link] = (),
    ) -> Span:
        try:
            return self._tracer.start_span(name, context, kind, attributes, links)
        except Exception as failure:
            # What observes must not stop what it observes: a sampler or processor of the application may raise anything.
            log.warning("span_not_started", error=failure)
            return self._trace.INVALID_SPAN

    def _follows_producers(self) -> bool:
        if self._drops_unsampled is None:
            sampler = getattr(self._provider(), "sampler", None)
            if sampler is None:
                return False  # there is no provider yet, or one of another kind
            self._drops_unsampled = _UNSAMPLED_PARENTS_ARE_DROPPED.match(sampler.get_description()) is not None
        return self._drops_unsampled

    def _parse(self, traceparent: str) -> SpanContext | None:
        if (valid := valid_traceparent(traceparent)) is None:
            return None
        _, trace_id, span_id, flags = valid.split("-")
        return self._trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=self._trace.TraceFlags(int(flags, 16))
        )

    @staticmethod
    def _attributes(operation: str, kind: str, destination: str, count: int, further: Mapping[str, Any]) -> dict[str, Any]:
        attributes = {
            "messaging.system": "penstock",
            "messaging.operation.name": operation,
            "messaging.operation.type": kind,
            "messaging.destination.name": destination,
            **further,
        }
        if count != 1:
            attributes["messaging.batch.message_count"] = count
        return attributes
