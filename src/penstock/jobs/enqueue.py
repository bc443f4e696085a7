"""Enqueueing: from the arguments of the caller to the columns that travel to the database, and back to receipts.

A batch is prepared while the database processes the one before it, in slices between which the loop can send and receive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import fields, replace
from datetime import datetime, timedelta
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeAlias, get_args
from uuid import UUID

from penstock.core.blocking import without_loop
from penstock.core.checks import check_choice, check_many, check_moment, check_number, check_span, check_texts
from penstock.core.encryption import SealedCodec
from penstock.core.garbage_collection import CollectedLater
from penstock.core.keys import KeyOf
from penstock.core.serialization import Codec
from penstock.errors import InvalidInput
from penstock.jobs import queries
from penstock.jobs.checks import LONGEST_TIMEOUT
from penstock.jobs.filling import Filling
from penstock.jobs.handler import running_job
from penstock.jobs.models import OWN_OPTIONS, Enqueued, EnqueueOutcome, NewJob, When, group_id, jobs_after, make_id
from penstock.jobs.queries import JobColumns
from penstock.jobs.records import parse_id
from penstock.jobs.transactional import enqueue_through
from penstock.postgres.context import Context

Exceptions: TypeAlias = dict[int, tuple[UUID, EnqueueOutcome]]
MOST_AT_ONCE = 10_000
_SLICE = 1_000
_OPTIONAL = {field.name: field.default for field in fields(NewJob) if field.name not in ("data", "id")}
_OPTIONS_OF, _NO_OPTIONS = attrgetter(*_OPTIONAL), tuple(_OPTIONAL.values())


async def enqueue_many(
    context: Context, name: str, codec: Codec[Any], new: Iterable[Any], connection: Any, key_of: KeyOf | None = None
) -> list[Enqueued]:
    """Enqueue payloads or `NewJob`s of one type, in batches of 10,000. Each batch is atomic.

    Args:
        context: Open databases of the application.
        name: Name of the job type.
        codec: Codec of its payloads.
        new: Payloads or `NewJob`s.
        connection: Connection of the caller, in whose transaction to enqueue; None: a connection of the application.
        key_of: Gives a payload its key where the job has none.
    """
    check_many("new jobs", new, 'enqueue_many([{"a": 1}, NewJob({"a": 2}, key="acme")])')
    items = list(new)
    if key_of is not None:
        items = [_with_key(item if isinstance(item, NewJob) else NewJob(item), key_of) for item in items]
    if (tracing := context.tracing) is None or not items:
        return await _enqueue(context, name, codec, items, connection)
    with tracing.sending("enqueue", name, len(items)) as traceparent:
        return await _enqueue(context, name, codec, items, connection, traceparent)


async def _enqueue(
    context: Context, name: str, codec: Codec[Any], items: Sequence[Any], connection: Any, traceparent: str | None = None
) -> list[Enqueued]:
    if without_loop():
        return await _send_in_turn(name, codec, items, connection, traceparent)
    if connection is not None:
        return await send_batches(name, codec, items, lambda batch: enqueue_through(connection, batch), traceparent)
    database = await context.database()
    return await send_batches(name, codec, items, lambda batch: queries.enqueue_many(database, batch), traceparent)


def _with_key(job: NewJob, key_of: KeyOf) -> NewJob:
    return job if job.key is not None else replace(job, key=key_of(job.data))


async def send_batches(
    name: str,
    codec: Codec[Any],
    items: Sequence[Any],
    send: Callable[[JobColumns], Awaitable[Exceptions]],
    traceparent: str | None = None,
) -> list[Enqueued]:
    """Send payloads or `NewJob`s in atomic batches of 10,000. Returns a receipt for each, in order.

    When a batch cannot be prepared or sent, the batches before it are enqueued and those after it are not. `traceparent` is the
    trace context of all jobs; None: they have none.
    """
    if not items:
        return []
    if len(items) <= _SLICE:
        # Nothing is to be prepared meanwhile: a single enqueue needs neither a task nor an iteration of the loop.
        batch = make_batch(name, codec, items, traceparent)
        return receipts_of(batch, await send(batch))
    receipts: list[Enqueued] = []
    sending: asyncio.Task[Exceptions] | None = None
    under_way: JobColumns | None = None
    try:
        for start in range(0, len(items), MOST_AT_ONCE):
            slices = []
            for at in range(start, min(start + MOST_AT_ONCE, len(items)), _SLICE):
                with CollectedLater():
                    slices.append(make_batch(name, codec, items[at : min(at + _SLICE, start + MOST_AT_ONCE)], traceparent))
                await asyncio.sleep(0)
            exceptions = await sending if sending is not None else {}
            before, under_way = under_way, _joined(slices)
            sending = asyncio.ensure_future(send(under_way))
            await asyncio.sleep(0)
            if before is not None:
                with CollectedLater():
                    receipts += receipts_of(before, exceptions)
        if under_way is not None and sending is not None:
            receipts += receipts_of(under_way, await sending)
    except asyncio.CancelledError:
        if sending is not None:
            sending.cancel()
        raise
    except Exception:
        if sending is not None:
            await asyncio.wait([sending])
        raise
    return receipts


async def _send_in_turn(
    name: str, codec: Codec[Any], items: Sequence[Any], connection: Any, traceparent: str | None
) -> list[Enqueued]:
    """`send_batches` in a blocking call, where there is no loop to make a batch while another one is sent."""
    receipts: list[Enqueued] = []
    for start in range(0, len(items), MOST_AT_ONCE):
        batch = make_batch(name, codec, items[start : start + MOST_AT_ONCE], traceparent)
        receipts += receipts_of(batch, await enqueue_through(connection, batch))
    return receipts


def make_batch(name: str, codec: Codec[Any], items: Sequence[Any], traceparent: str | None = None) -> JobColumns:
    """The columns of jobs that are given as payloads or `NewJob`s. A column is None when all its values are the default."""
    if not any(isinstance(item, NewJob) for item in items):
        return JobColumns(name, [make_id() for _ in items], [codec.dump(data) for data in items], traceparent=traceparent)
    new = [item if isinstance(item, NewJob) else NewJob(item) for item in items]

    def column(values: list[Any], default: Any = None) -> list[Any] | None:
        return values if any(value != default for value in values) else None

    def texts(what: str, values: list[Any]) -> list[Any] | None:
        check_texts(what, values)
        return column(values)

    if wrong := [job.priority for job in new if type(job.priority) is not int]:
        raise InvalidInput(
            f"priority must be an integer, not {wrong[0]!r}", hint="A priority is an integer from -100 (first) to 100 (last)."
        )
    if bad := next((job.priority for job in new if not -100 <= job.priority <= 100), None):
        raise InvalidInput(f"priority {bad} is out of range", hint="A priority is an integer from -100 (first) to 100 (last).")
    filling = None if (running := running_job()) is None else running.filling
    if filling is not None:
        new = [_of_filled(filling, name, codec, job) for job in new]
    ids = [make_id() if job.id is None else parse_id(job.id) for job in new]
    data = [codec.dump(job.data) for job in new]
    if list(map(_OPTIONS_OF, new)).count(_NO_OPTIONS) == len(new):
        return JobColumns(name, ids, data, traceparent=traceparent)
    return JobColumns(
        name,
        ids,
        data,
        texts("key of a job", [job.key for job in new]),
        column([job.priority for job in new], 0),
        column([aware("run_after", job.run_after) for job in new]),
        column([aware("expires_at", job.expires_at) for job in new]),
        texts("unique", [job.unique for job in new]),
        column([own_options(job) for job in new]),
        traceparent,
    )


def _of_filled(filling: Filling, name: str, codec: Codec[Any], job: NewJob) -> NewJob:
    """A child of a group that the running handler fills, with the id that it has in each attempt."""
    if job.id is not None or job.group is None or (group := group_id(job.group)) not in filling:
        return job
    plain = codec.plain if isinstance(codec, SealedCodec) else codec
    return replace(job, id=filling.child_id(group, name, job.key, plain.dump(job.data)))


def own_options(job: NewJob) -> dict[str, Any] | None:
    """The `OWN_OPTIONS` of a job as `JobColumns` has them, spans in seconds; None: it has none. Raises `InvalidInput`."""
    own = job.own
    if job.unique_for is not None and job.unique is None:
        raise InvalidInput("unique_for is given without unique", hint="Give the key that the job holds for this time: unique=...")
    for name, value in own.items():
        if name == "after":
            own[name] = [str(id) for id in jobs_after(value)]
        elif name == "group":
            own[name] = str(group_id(value))
        elif name == "when":
            check_choice("when", value, get_args(When))
        elif OWN_OPTIONS[name] is int:
            check_number(f"{name} of a job", value, 1, 32_767)
        else:
            check_span(f"{name} of a job", value, longest=LONGEST_TIMEOUT)
            own[name] = value.total_seconds()
    if "when" in own and "after" not in own:
        raise InvalidInput("when is given without after", hint="Give the jobs for whose end the job waits: after=...")
    return own or None


def receipts_of(batch: JobColumns, exceptions: Exceptions) -> list[Enqueued]:
    """A receipt for each job of a batch."""
    queued = EnqueueOutcome.QUEUED
    if not exceptions:
        return list(map(Enqueued, batch.ids, repeat(queued)))
    return [Enqueued(*exceptions.get(index, (id, queued))) for index, id in enumerate(batch.ids)]


def _joined(slices: Sequence[JobColumns]) -> JobColumns:
    if len(slices) == 1:
        return slices[0]

    def column(name: str, default: Any = None) -> list[Any] | None:
        columns = [getattr(part, name) for part in slices]
        if all(values is None for values in columns):
            return None
        return [
            value
            for part, values in zip(slices, columns, strict=True)
            for value in (values if values is not None else [default] * len(part.ids))
        ]

    return JobColumns(
        slices[0].name,
        [id for part in slices for id in part.ids],
        [data for part in slices for data in part.data],
        column("keys"),
        column("priorities", 0),
        column("run_after"),
        column("expires_at"),
        column("unique"),
        column("options"),
        slices[0].traceparent,
    )


def aware(what: str, time: datetime | timedelta | None) -> datetime | timedelta | None:
    """Return the time. Raises `InvalidInput` unless it is a timedelta, None or a datetime with a time zone."""
    if time is not None:
        check_moment(what, time)
    return time
