"""Durable steps of the jobs of one process: what `Job.step`, `sleep`, `wait_for` and `gather` do.

The steps that end at the same time are written by one statement with one commit, as settlements are. A job reads the steps of its
runs before with its first step, so that a job without steps pays nothing. It reads them in parts, and a large result when the
handler comes to its step: 10,000 results of 256 KiB never lie in the memory of the worker together.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import typing
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar
from uuid import UUID

from penstock.core.blocking import run_without_loop
from penstock.core.checks import check_function, check_many, check_span, storable_text
from penstock.core.coalescing import GroupCommit
from penstock.core.dependencies import name_of
from penstock.core.serialization import Codec, dump_json, load_json
from penstock.errors import Conflict, InvalidInput, JobFailed
from penstock.jobs import opening
from penstock.jobs import queries as jobs
from penstock.jobs.child import ChildJob, ChildType
from penstock.jobs.filling import in_step
from penstock.jobs.models import NewJob
from penstock.jobs.records import Status
from penstock.jobs.steps import Suspended
from penstock.jobs.transactional import write_step_through
from penstock.postgres.database import Database
from penstock.worker.finishing import Finishing
from penstock.worker.held import HeldJob
from penstock.workflows import queries
from penstock.workflows.queries import StepResult, Wait, Waiting

LARGEST_RESULT = 256 * 1024
MOST_CHILDREN = 10_000
MOST_STEPS = 10_000
LONGEST_WAIT = timedelta(days=3660)
LONGEST_OPEN_S = 3.0
"""How long a step waits for the end of a transaction of its own handler, which another task of it may be about to commit."""
_LONGEST_NAME = 200
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.2
T = TypeVar("T")
WaitKind: TypeAlias = Literal["sleep", "wait", "gather"]


class Known(typing.NamedTuple):
    """A step of an earlier run: its kind, and its result as it is stored; None when it is large, and to be read by itself."""

    kind: str
    result: str | None
    is_large: bool = False


class StepRecorder:
    """Reads and writes the steps of all jobs of a process: of those that ask while a call is under way, in the next one.

    Args:
        database: Database of the jobs.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._reads: GroupCommit[str, UUID, dict[str, Known]] = GroupCommit(self._read)
        self._results: GroupCommit[str, tuple[UUID, str], str | None] = GroupCommit(self._read_results, most=queries.MOST_RESULTS)
        self._writes: GroupCommit[str, StepResult, str] = GroupCommit(self._write)
        self._waits: GroupCommit[str, Wait, Waiting] = GroupCommit(self._begin)

    async def read(self, id: UUID) -> dict[str, Known]:
        """The steps of a job in its runs before, by name."""
        return await self._reads.submit("", id)

    async def result(self, id: UUID, name: str) -> str | None:
        """The result of a step of a run before, as it is stored."""
        return await self._results.submit("", (id, name))

    async def write(self, result: StepResult) -> str:
        """Keep a result. Returns when it is committed: "written", "known", "stale", or "busy" and nothing is."""
        return await self._writes.submit("", result)

    async def begin(self, wait: Wait) -> Waiting:
        """Begin to wait, or go on."""
        return await self._waits.submit("", wait)

    async def _read(self, _: str, ids: list[UUID]) -> list[dict[str, Known]]:
        found: dict[UUID, dict[str, Known]] = defaultdict(dict)
        for row in await queries.kept_steps(self.database, ids):
            found[row["id"]][row["name"]] = Known(row["kind"], row["result"], row["is_large"])
        return [found[id] for id in ids]

    async def _read_results(self, _: str, wanted: list[tuple[UUID, str]]) -> list[str | None]:
        return await queries.kept_results(self.database, wanted)

    async def _write(self, _: str, results: list[StepResult]) -> list[str]:
        return await queries.write_steps(self.database, results)

    async def _begin(self, _: str, waits: list[Wait]) -> list[Waiting]:
        return await queries.begin_waits(self.database, waits)


class Steps:
    """The durable steps of one run of a job. A `StepControl`.

    Args:
        held: The job.
        recorder: Reads and writes its steps.
    """

    def __init__(self, held: HeldJob, recorder: StepRecorder) -> None:
        self._held = held
        self._recorder = recorder
        self._known: dict[str, Known] | None = None
        self._used: set[str] = set()
        # Steps that are kept by transactions of the handler, of which it is not known whether they were committed.
        self._through: set[str] = set()

    async def do(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], connection: Any
    ) -> Any:
        """See `StepControl`."""
        codec = _codec_of(name, function)
        known = await self._enter(name)
        try:
            if known is not None:
                return codec.load(self._opened(name, known.result))
            with in_step(name):
                result = function(*args, **kwargs)
                if inspect.isawaitable(result):
                    result = await result
            text = self._text(name, codec.dump(result))
            if connection is None:
                text = await self._keep(name, text)
            else:
                with self._through_own() as finishing:
                    await self._keep_through(connection, name, text, finishing)
        except BaseException:
            self._used.discard(name)
            raise
        return codec.load(text)

    def do_blocking(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], connection: Any
    ) -> Any:
        """See `StepControl`."""
        codec = _codec_of(name, function)
        known: Known | None = self.blocking(self._enter(name))
        try:
            if known is not None:
                return codec.load(self._opened(name, known.result))
            with in_step(name):
                result = function(*args, **kwargs)
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise InvalidInput(
                    f"the step {name} of a plain handler is async: {name_of(function)}",
                    hint="Give a plain function, or make the handler async and await job.step.",
                )
            text = self._text(name, codec.dump(result))
            if connection is None:
                text = self.blocking(self._keep(name, text))
            else:
                with self._through_own() as finishing:
                    if self._held.reason not in (None, "cancelled"):
                        # The worker has settled the job without this thread, or is about to.
                        raise self._lost()
                    run_without_loop(self._keep_through(connection, name, text, finishing))
        except BaseException:
            self._used.discard(name)
            raise
        return codec.load(text)

    async def sleep(self, name: str, duration: timedelta) -> None:
        """See `StepControl`."""
        check_span(f"the duration of the sleep {name}", duration, zero=True, longest=LONGEST_WAIT)
        self._use(name)
        await self._wait("sleep", name, duration)

    async def wait_for(self, name: str, type: Any, timeout: timedelta | None) -> Any:
        """See `StepControl`."""
        if timeout is not None:
            check_span(f"the timeout of the wait {name}", timeout, zero=True, longest=LONGEST_WAIT)
        codec: Codec[Any] = Codec(type, f"the signal {name}")
        self._use(name)
        answer = await self._wait("wait", name, timeout)
        if answer.state == "timeout":
            raise TimeoutError(f"no signal {name} came to job {self._held.claimed.id} in time")
        owner = str(self._held.claimed.id)
        return codec.load(self._held.sealer.open("signal", answer.value or "null", owner, name))

    async def gather(self, name: str, children: Sequence[ChildJob]) -> list[Any]:
        """See `StepControl`."""
        children = _checked(name, children)
        if not children:
            # Kept as the result of any step: a further run that has children all the same is refused.
            return list(await self.do(name, list, (), {}, None))
        self._use(name)
        answer = await self._wait("gather", name, None)
        if answer.state == "new":
            assert answer.group is not None  # noqa: S101
            await self._enqueue(name, children, answer.group)
            await queries.seal_group(self._recorder.database, answer.group)
            raise self._suspended(name)
        if answer.state == "ended":
            found, keeps = await self._results(name, children)
            text = self._text(name, dump_json(found, f"the step {name}"))
            if keeps:
                await self._keep(name, text)
        else:
            text = self._opened(name, answer.value)
        results: list[Any] = load_json(text)
        if len(results) != len(children):
            raise Conflict(
                f"the step {name} of job {self._held.claimed.id} had {len(results)} children, and has {len(children)} now",
                hint="Give it the same children in each run, such as those of the payload or of a step before.",
            )
        return results

    def blocking(self, call: Coroutine[Any, Any, Any]) -> Any:
        """See `StepControl`."""
        if _on_loop():
            call.close()
            raise InvalidInput(
                "a blocking step is taken on the event loop, which would wait for itself",
                hint="Await job.step, job.sleep, job.wait_for or job.gather in async handlers.",
            )
        return asyncio.run_coroutine_threadsafe(call, self._held.executor.loop).result()

    def _use(self, name: str) -> None:
        """Note that a name is used. Raises `InvalidInput` when it cannot be, or was used in this run."""
        fits = isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and "/" not in name
        if not fits or not storable_text(name) or any(character < " " for character in name):
            raise InvalidInput(
                f"invalid name of a step: {name!r:.100}",
                hint="A name is text of 1 to 200 characters, without a slash and without control characters.",
            )
        if name in self._used:
            raise self._twice(name)
        if len(self._used) >= MOST_STEPS:
            raise InvalidInput(
                f"job {self._held.claimed.id} of {self._held.claimed.name} has more than {MOST_STEPS:,} steps",
                hint="Each run reads all of them. Give a step more to do, or enqueue jobs and gather their results.",
            )
        self._used.add(name)

    async def _enter(self, name: str) -> Known | None:
        """Begin a step. Returns its result of a run before; None: it is to be done."""
        if name in self._through:
            # Its transaction was committed, or it was rolled back and the handler does it again.
            self._through.discard(name)
            if await self._recorder.result(self._held.claimed.id, name) is None:
                self._used.discard(name)
        self._use(name)
        if self._known is None:
            known = await self._recorder.read(self._held.claimed.id)
            self._known = known if self._known is None else self._known
        found = self._known.get(name)
        if found is not None and found.kind != "step":
            self._used.discard(name)
            raise self._other_kind(name)
        if found is not None and found.is_large:
            try:
                return Known("step", await self._recorder.result(self._held.claimed.id, name))
            except BaseException:
                self._used.discard(name)
                raise
        return found

    async def _keep(self, name: str, text: str) -> str:
        """Keep the result of a step. Returns the text that is kept: that of an earlier try of this call, when there was one."""
        result = self._result(name, text)
        outcome = await self._when_free(name, lambda: self._recorder.write(result), lambda outcome: outcome)
        if outcome == "stale":
            raise self._lost()
        if outcome == "known":
            return self._opened(name, await self._recorder.result(self._held.claimed.id, name))
        return text

    @contextmanager
    def _through_own(self) -> Iterator[Finishing]:
        """Around the write of a step in a transaction of the handler, for which the worker waits before it settles the job."""
        if (finishing := self._held.finishing) is None:
            finishing = self._held.finishing = Finishing(self._held)
        with finishing.write():
            yield finishing

    async def _keep_through(self, connection: Any, name: str, text: str, finishing: Finishing) -> None:
        outcome, transaction = await write_step_through(connection, *self._result(name, text))
        finishing.transactions.add(transaction)
        if outcome == "stale":
            raise self._lost()
        if outcome == "known":
            raise self._twice(name)
        self._through.add(name)

    async def _wait(self, kind: WaitKind, name: str, span: timedelta | None) -> Waiting:
        """Begin to wait, or go on. Raises `Suspended` while it lasts."""
        wait = Wait(self._held.claimed.id, self._held.lease, kind, name, span)
        answer = await self._when_free(name, lambda: self._recorder.begin(wait), lambda answer: answer.state)
        if answer.state == "stale":
            raise self._lost()
        if answer.state == "other":
            raise self._other_kind(name)
        if answer.state == "open":
            raise self._suspended(name)
        return answer

    async def _when_free(self, name: str, call: Callable[[], Awaitable[T]], state_of: Callable[[T], str]) -> T:
        """Repeat a call while another transaction has the row of the job locked. Raises `InvalidInput` when that is one of the
        handler's own, which stays open: it would wait for itself.
        """
        pause, began = _FIRST_PAUSE_S, time.monotonic()
        while state_of(answer := await call()) == "busy":
            if time.monotonic() - began > LONGEST_OPEN_S and await self._held.executor.confirmer.is_open(self._held.finishing):
                raise InvalidInput(
                    f"the step {name} of job {self._held.claimed.id} waits for a transaction of its own handler, which is open",
                    hint="Commit the transaction that has a step or finish() before the next step, or give both its connection.",
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return answer

    async def _enqueue(self, name: str, children: Sequence[ChildJob], group: UUID) -> None:
        """Enqueue the children, with the same ids in each run."""
        by_type: dict[ChildType, list[NewJob]] = defaultdict(list)
        for id, child in zip(await self._ids(name, children), children, strict=True):
            by_type[child.type].append(replace(child.new, id=id, group=group))
        for type, new in by_type.items():
            await type.enqueue_many(new)

    async def _results(self, name: str, children: Sequence[ChildJob]) -> tuple[list[Any], bool]:
        """The results of children that have ended, and whether they may be kept: what is encrypted is not stored in a job that is
        not, so that each run reads it again. Raises `JobFailed` when a child did not succeed, or `KeyMissing`.
        """
        ids = await self._ids(name, children)
        found = await jobs.find(self._recorder.database, ids)
        records = [found.get(id) for id in ids]
        sealer = self._held.sealer
        seals = sealer.encrypted and bool(sealer.keyring)
        failed = [record for record in records if record is not None and record.status is not Status.SUCCEEDED]
        if failed:
            first = opening.opened(failed[0], sealer.keyring)
            message = first.errors[-1].get("message") if first.errors and (seals or not first.encrypted) else None
            raise JobFailed(
                f"{len(failed)} of the {len(children)} children of {name} did not succeed; "
                f"job {first.id} of {first.name} {first.status}" + (f": {message}" if message else "")
            )
        if None in records:
            raise Conflict(
                f"{records.count(None)} of the {len(children)} children of {name} are not in the archive",
                hint="They are others than in the run before, or were pruned meanwhile: keep them for as long as the job waits.",
            )
        ended = [record for record in records if record is not None]
        keeps = seals or not any(record.encrypted for record in ended)
        return [opening.result_of(record, sealer.keyring) for record in ended], keeps

    async def _ids(self, name: str, children: Sequence[ChildJob]) -> list[UUID]:
        held, types = self._held, [child.type.name for child in children]
        ids = await queries.child_ids(self._recorder.database, held.claimed.id, held.lease, name, types)
        if ids is None:
            raise self._lost()
        return ids

    def _text(self, name: str, text: str) -> str:
        """The JSON text of a result. Raises `InvalidInput` when it is too large."""
        if len(text.encode()) > LARGEST_RESULT:
            raise InvalidInput(
                f"the result of the step {name} has {len(text.encode()):,} bytes, more than 256 KiB",
                hint="Store it in a table or an object store of your own, and return a reference to it, such as its key.",
            )
        return text

    def _result(self, name: str, text: str) -> StepResult:
        held = self._held
        return StepResult(held.claimed.id, held.lease, name, held.sealer.seal("step", text, str(held.claimed.id), name))

    def _opened(self, name: str, stored: str | None) -> str:
        return self._held.sealer.open("step", stored or "null", str(self._held.claimed.id), name)

    def _suspended(self, name: str) -> Suspended:
        """What ends this run. A handler that returns all the same has caught it, which the executor has to know."""
        self._held.suspended = name
        return Suspended(name)

    def _lost(self) -> Conflict:
        return Conflict(
            f"job {self._held.claimed.id} no longer belongs to this worker", hint="Stop: another worker may be running it."
        )

    def _twice(self, name: str) -> InvalidInput:
        claimed = self._held.claimed
        return InvalidInput(
            f"job {claimed.id} of {claimed.name} has two steps of the name {name}",
            hint='Give each step a name of its own, in a loop with what it is for: f"resize {image}".',
        )

    def _other_kind(self, name: str) -> Conflict:
        claimed = self._held.claimed
        return Conflict(
            f"the step {name} of job {claimed.id} of {claimed.name} was of another kind in a run before",
            hint="Give a changed step a new name: jobs that began before the change run on with the new code.",
        )


def _checked(name: str, children: Any) -> Sequence[ChildJob]:
    check_many("the children", children, f'job.gather("{name}", [resize.child(image) for image in images])')
    checked: list[ChildJob] = list(children)
    for child in checked:
        if not isinstance(child, ChildJob):
            if inspect.iscoroutine(child):
                child.close()
            raise InvalidInput(
                f"a child of {name} must be a job, not {child!r:.100}", hint="Make it with JobType.child: resize.child(image)."
            )
        if child.new.id is not None or child.new.group is not None:
            raise InvalidInput(f"a child of {name} is given an id or a group", hint="The step gives it both. Leave them out.")
        if child.new.unique is not None or child.new.unique_for is not None:
            raise InvalidInput(
                f"a child of {name} is given a unique key", hint="It might be another job, which is no child of it. Leave it out."
            )
    if len(checked) > MOST_CHILDREN:
        raise InvalidInput(
            f"{name} has {len(checked):,} children, more than {MOST_CHILDREN:,}",
            hint="Enqueue them in a job group, app.job_group(..., then=...), or let children gather a part each.",
        )
    return checked


def _on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _codec_of(name: str, function: Callable[..., Any]) -> Codec[Any]:
    """The codec of what a function returns. Raises `InvalidInput` when it is no function, or returns what cannot be stored."""
    check_function(f"the step {name}", function, 'await job.step("pay", charge, job.data)')
    try:
        return _codec_of_function(name, function)
    except TypeError:  # what cannot be hashed
        return _codec_of_function.__wrapped__(name, function)


@functools.lru_cache(maxsize=512)
def _codec_of_function(name: str, function: Callable[..., Any]) -> Codec[Any]:
    returned = function
    while isinstance(returned, functools.partial):
        returned = returned.func
    target: Any = returned if inspect.isroutine(returned) else type(returned).__call__
    try:
        found = typing.get_type_hints(target, include_extras=True).get("return", Any)
    except Exception:  # such as a name that exists for the type checker only
        found = Any
    if typing.get_origin(found) in (Awaitable, Coroutine):
        found = typing.get_args(found)[-1]
    return Codec(Any if isinstance(found, typing.TypeVar) else found, f"the step {name}")
