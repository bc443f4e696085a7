"""Models of operations: plain data, no input or output."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, TypeAlias
from uuid import UUID

from pydantic import ConfigDict, Field

from penstock.core.checks import check_time
from penstock.core.records import example
from penstock.errors import InvalidInput
from penstock.jobs.models import GroupReference, group_id
from penstock.jobs.records import JobId, Status

FAILING_BATCH = "the batch fails: "
"""How the error of an operation begins whose batch fails as a whole; penstock.advance_operation writes it."""
OperationKind: TypeAlias = Literal["cancel", "replay", "purge", "set-priority", "run-now"]


def check_priority_of(kind: OperationKind, priority: int | None) -> None:
    """Raise `InvalidInput` unless the new priority is given for `set-priority`, and for nothing else."""
    if kind == "set-priority" and priority is None:
        raise InvalidInput("set-priority needs the new priority", hint="Give priority, from -100 (first) to 100, such as -10.")
    if kind != "set-priority" and priority is not None:
        raise InvalidInput(
            f"{kind} takes no priority, and {priority!r} is given", hint="Leave priority out, or use set-priority."
        )


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs an operation changes: those that meet all conditions that are given. At least one is.

    Attributes:
        name: Name of their type.
        status: Their status. For a cancellation `queued` or `in-progress` (None: both), for a replay that of finished jobs (None:
            `failed`), for `run-now` `queued` or None.
        key: Their key.
        reason: Why they ended (`quarantined`, `purged`, `dropped`, `dependency`, `group`); only for a replay.
        error: Type of their last error, such as `TimeLimit`; only for a replay.
        since: Enqueued, for a replay finished, not before.
        until: Enqueued, for a replay finished, before.
        workflow: Job group whose children they are, or its id.
        signature: Signature of their last error, as the dashboard and a report of failures show it; only for a replay.
    """

    name: str | None = None
    status: Status | str | None = None
    key: str | None = None
    reason: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    workflow: GroupReference | None = None
    signature: str | None = None

    def as_json(self) -> dict[str, str]:
        """The filter in the form that the SQL functions accept.

        Raises:
            InvalidInput: `since` or `until` is not a datetime with a time zone, or `workflow` is no job group.
        """
        conditions: dict[str, str] = {}
        for name in ("name", "status", "key", "reason", "error", "signature"):
            if (value := getattr(self, name)) is not None:
                conditions[name] = str(value)
        for name in ("since", "until"):
            if (time := getattr(self, name)) is not None:
                conditions[name] = check_time(name, time).isoformat()
        if self.workflow is not None:
            conditions["workflow"] = str(group_id(self.workflow, "workflow"))
        return conditions


@dataclass(frozen=True, slots=True)
class Erasure:
    """What an erasure removes: all that belongs to a key, or all whose payload has a value in a field, or one job.

    Attributes:
        key: Key of jobs, events and standing jobs.
        field: Field of payloads, within an object with a dot: `customer.id`.
        value: Value of the field, as text.
        job: Id of one job.
        rewrite: Whether tables are rewritten at the end, so that no byte stays in their files; each is locked meanwhile.
        skip_unseen: Whether to leave payloads whose fields cannot be seen, since they are encrypted or bytes.
    """

    key: str | None = None
    field: str | None = None
    value: str | None = None
    job: UUID | str | None = None
    rewrite: bool = False
    skip_unseen: bool = False

    def as_json(self) -> dict[str, str | bool]:
        """The erasure in the form that the SQL functions accept."""
        given = {name: str(value) for name in ("key", "field", "value", "job") if (value := getattr(self, name)) is not None}
        return given | {name: True for name in ("rewrite", "skip_unseen") if getattr(self, name)}


@dataclass(frozen=True, slots=True)
class ErasurePreview:
    """What an erasure would remove now. Lakes are not looked into.

    Attributes:
        queued: Number of jobs that wait or run.
        archived: Number of finished jobs.
        events: Number of events in streams.
        messages: Number of messages of topics, each with its copies.
        standing: Number of standing jobs.
        unseen: Number of job types, topics and streams with payloads whose fields cannot be seen.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "queued": 2, "archived": 310, "events": 1204, "messages": 0, "standing": 1, "unseen": 0,
    })  # fmt: skip

    queued: int
    archived: int
    events: int
    messages: int
    standing: int
    unseen: int


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """An operation: what it changes, and how far it is.

    Attributes:
        id: Id of the operation.
        kind: `cancel`, `replay`, `purge`, `set-priority`, `run-now` or `erase`.
        state: `running`, `finished`, or `cancelled` before its end.
        filter: Conditions of the filter that are given; of `set-priority` also `new_priority`. An erasure that has removed
            everything does not say whose it was.
        started_at: Time of the start; jobs that are enqueued, or finish, later are not part of it.
        started_by: Database role that started it.
        updated_at: Time of its last batch.
        finished_at: Time of its end.
        looked_at: Number of jobs that it has looked at, matching or not, in all passes.
        done: Number of jobs that it has changed.
        skipped: Number of matching jobs that were replayed already.
        failed: Number of matching jobs that could not be changed.
        postponed: Number of jobs that other transactions hold, which the next pass looks at.
        error: Why the last job that could not be changed could not; of an operation whose batch fails, `the batch fails: ...`.
        phase: Of an erasure, where it is: `queue`, `archive`, `streams`, `messages`, `signals`, `rest`, `lake` or
            `vacuum`.
        counts: Of an erasure, what it has removed, by kind: `queued`, `archived`, `events`, `messages`, `standing`, `rows` (that
            have the key elsewhere), `lake`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "id": "0199f7c2-6a40-7cc1-a3c5-0f3f3c0ad0b5", "kind": "replay", "state": "running",
        "filter": {"name": "invoice-shipments", "status": "failed"}, "started_at": "2026-01-11T18:26:26Z", "started_by": "app",
        "updated_at": "2026-01-11T18:26:30Z", "finished_at": None, "looked_at": 12000, "done": 310, "skipped": 2, "failed": 0,
        "postponed": 0, "error": None, "phase": None, "counts": None,
    })  # fmt: skip

    id: UUID
    kind: Annotated[str, Field(description="cancel, replay, purge, set-priority, run-now or erase.")]
    state: Annotated[str, Field(description="running, finished, or cancelled before its end.")]
    filter: dict[str, Any]
    started_at: datetime
    started_by: Annotated[str, Field(description="The database role that started it.")]
    updated_at: datetime
    finished_at: datetime | None
    looked_at: Annotated[int, Field(description="Jobs that it has looked at, matching or not, in all passes.")]
    done: Annotated[int, Field(description="Jobs that it has changed.")]
    skipped: Annotated[int, Field(description="Matching jobs that were replayed already.")]
    failed: Annotated[int, Field(description="Matching jobs that could not be changed.")]
    postponed: Annotated[int, Field(description="Jobs that other transactions hold, for the next pass.")]
    error: Annotated[
        str | None, Field(description="Why the last job that could not be changed could not, or why the batch fails.")
    ]
    phase: Annotated[
        str | None, Field(description="Of an erasure: queue, archive, streams, messages, signals, rest, lake or vacuum.")
    ]
    counts: Annotated[dict[str, int] | None, Field(description="Of an erasure: what it has removed, by kind.")]

    @property
    def ended(self) -> bool:
        """Whether it is finished or cancelled."""
        return self.state != "running"


@dataclass(frozen=True, slots=True)
class OperationPreview:
    """What an operation would change now.

    Attributes:
        jobs: Number of jobs that match.
        whole: Whether these are all; otherwise there are more.
        sample: The first ten of them, by their ids.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "jobs": 312, "whole": True, "sample": ["job_282227eb-3c76-4ef7-af7e-25dff933077f"],
    })  # fmt: skip

    jobs: int
    whole: Annotated[bool, Field(description="Whether these are all; otherwise there are more.")]
    sample: list[JobId]
