"""A pool in a worker: its handlers, and the options that apply while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.encryption import Keyring, Sealer
from penstock.core.serialization import Codec
from penstock.groups.assignors import KeyAssign
from penstock.jobs.options import Options, PoolOptions
from penstock.jobs.records import JobTypeRecord
from penstock.jobs.worked import WorkedType

StandingHandler = Callable[[Any], Any]


@dataclass(slots=True)
class WorkedPool:
    """One pool of a worker.

    `type` is the type of its jobs; None: the application has no handler for them, only for standing jobs. `member` is the id of
    the worker in the pool; None: an id that begins with that of its process.
    """

    name: str
    declared: Options
    options: PoolOptions
    type: WorkedType | None
    assign: KeyAssign | None = None
    standing: StandingHandler | None = None
    standing_codec: Codec[Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    member: str | None = None
    sealer: Sealer = field(default_factory=lambda: Sealer(Keyring(), ""))

    def refresh(self, record: JobTypeRecord) -> None:
        """Apply the options of the job type that the database has."""
        self.sealer.refresh(record)
        if self.type is not None:
            self.type.refresh(record)
