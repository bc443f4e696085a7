"""A job type in a worker: its handler, where the handler runs, and the options that apply while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID

import orjson

from penstock.core.dependencies import Overrides
from penstock.core.encryption import Keyring, SealedCodec, Sealer
from penstock.core.hooks import Around
from penstock.core.serialization import Codec
from penstock.jobs.handler import Handler, HandlerKind
from penstock.jobs.options import Delivery, Options
from penstock.jobs.records import JobTypeRecord


class Held(Protocol):
    """A claimed job. Its lease gets a new number with each extension."""

    lease: int


class NotStarted(Exception):
    """Raised by a handler that has not started its work: the job is released as if it had not been claimed."""


class SettledElsewhere(Exception):
    """Raised by a handler whose job has been settled elsewhere, as by a callback: the worker has nothing left to settle."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How a batch handler gets its jobs.

    Attributes:
        max_batch_size: Largest number of jobs in a batch.
        linger: How long the first job of a batch waits for others.
        by_key: Whether all jobs of a batch have the same key.
    """

    max_batch_size: int
    linger: timedelta = timedelta(0)
    by_key: bool = False


@dataclass(slots=True)
class WorkedType:
    """One job type of a worker. Its limits are refreshed from the database while the worker runs.

    Attributes:
        name: Name of the type.
        declared: Options in the code.
        codec: Codec of its payloads.
        handler: Handler, a function of a `Job` and its dependencies.
        kind: Where the handler runs.
        around: Middleware and dependencies around the handler; None: it has none.
        batch: How its handler gets batches; None: it takes one job.
        sealer: Encrypts what is written of its jobs, when the type is encrypted.
        overrides: What stands in for dependencies of its handler, when that runs in a process, where they are made.
    """

    name: str
    declared: Options
    codec: Codec[Any]
    handler: Handler
    kind: HandlerKind
    around: Around | None = None
    batch: BatchOptions | None = None
    limit: timedelta | None = None
    keep_result: bool = False
    limited: bool = False
    once: bool = False
    sealer: Sealer = field(default_factory=lambda: Sealer(Keyring(), ""))
    overrides: Callable[[], Overrides] = dict

    @property
    def lane(self) -> str:
        """Where its jobs wait for a place: with all handlers of their kind, or for the batches of their type."""
        return self.kind if self.batch is None else f"batches of {self.name}"

    def refresh(self, record: JobTypeRecord) -> None:
        """Apply the options that the database has."""
        self.limit = record.time_limit
        self.keep_result = record.keep_result
        self.limited = record.concurrency is not None or record.rate_limit is not None
        self.once = record.delivery_strategy is Delivery.AT_MOST_ONCE
        self.sealer.refresh(record)
        if self.sealer.has_envelopes:
            # Encrypted jobs may wait, also when this application does not declare the type so.
            self.codec = self.sealer.codec(self.codec)

    def plain_text(self, text: str) -> str:
        """The JSON text of a payload. Raises `Unreadable` and `KeyMissing`."""
        return self.codec.open(text) if isinstance(self.codec, SealedCodec) else text

    def sealed(self, kind: str, id: UUID, text: str) -> str:
        """A document of a job (its result or progress) as it is stored."""
        return self.sealer.seal(kind, text, str(id))

    def sealed_error(self, id: UUID, error: Mapping[str, Any]) -> str:
        """The error of an attempt as it is stored, JSON text."""
        return orjson.dumps(self.sealer.seal_error("error", error, str(id))).decode()

    def time_limit(self, lease_s: float) -> float:
        """Seconds that a handler may run, counted from before the claim, so that it ends before its lease does."""
        return min(self.limit.total_seconds(), lease_s) if self.limit is not None else lease_s * 0.9
