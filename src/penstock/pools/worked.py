"""A pool as a worker works it: the type of its jobs, its standing jobs, and what makes it a pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.serialization import Codec
from penstock.groups.assignors import KeyAssign
from penstock.jobs.models import Options, PoolOptions
from penstock.jobs.worked import WorkedType

StandingHandler = Callable[[Any], Any]


@dataclass(slots=True)
class WorkedPool:
    """One pool of a worker: the type of its jobs (None: it has only standing jobs here), and what makes it a pool.

    `member` is its id in the pool; None: one that begins like that of its process.
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
