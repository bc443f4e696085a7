"""The bridge to Gearman: gearhorn's three functions on a real gearmand, with Penstock as the store of subscribers.

`subscribe_fanout` and `unsubscribe_fanout` take `{"topic", "client_id"}`, `fanout` takes `{"topic", "payload"}` and, if wanted,
`unique` and `background`. Each subscriber's copy goes to the Gearman function `<topic>_<client_id>`.

A fan-out is a publish. The copies of the Gearman subscribers are jobs in the queue of the bridge, each with the name of its
Gearman function as key; any bridge of that queue submits them to gearmand. So bridges share the work, the other bridges recover
the copies of one that crashed, and messages that are published from Python or SQL reach Gearman subscribers too.

Penstock queues can also be exposed as Gearman functions (a Gearman job becomes a Penstock job, whose result goes back), and
Penstock jobs can be forwarded to Gearman workers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import orjson

from penstock.app import Penstock
from penstock.core.checks import storable_text
from penstock.core.coalescing import GroupCommit
from penstock.core.logs import get_logger
from penstock.core.serialization import dump_json, plain_text
from penstock.core.tracing import valid_traceparent
from penstock.errors import Conflict, DatabaseUnavailable, InvalidInput, NotFound, PenstockError
from penstock.integrations.gearman.deliveries import Deliveries
from penstock.integrations.gearman.wire import Server, TakenJob, Wire, as_bytes, parsed
from penstock.jobs import queries as jobs
from penstock.jobs.handler import Job
from penstock.jobs.models import make_id
from penstock.jobs.options import Backoff, Options
from penstock.jobs.records import JobRecord, Status
from penstock.topics import queries as topics
from penstock.topics.models import Published
from penstock.topics.topic import Topic
from penstock.worker import Worker

log = get_logger("penstock.gearman")
_MOST_AT_ONCE = 1_000
T = TypeVar("T")


class Bridge:
    """Connects gearmands with a database until it is stopped.

    Args:
        app: An application that only the bridge uses.
        servers: Addresses of the gearmands.
        name: The queue of the copies for Gearman subscribers. Bridges to the same gearmands share it; others need another one.
        expose: Job types that are offered as Gearman functions.
        forward: Job types whose jobs Gearman workers run, under the same name.
        timeout: The longest time for which a foreground fan-out waits for its receivers.

    Attributes:
        workers: Its workers, as soon as it runs.
    """

    def __init__(
        self,
        app: Penstock,
        servers: Sequence[Server],
        *,
        name: str = "gearman",
        expose: Sequence[str] = (),
        forward: Sequence[str] = (),
        timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        if not servers:
            raise InvalidInput("there is no Gearman server to serve", hint="Give at least one HOST:PORT.")
        self.name = name
        self._app = app
        self._servers = servers
        self._expose = list(expose)
        self._forward = list(forward)
        self._timeout = timeout
        self.workers: list[Worker] = []
        self._stop = asyncio.Event()
        self._serving = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        self._finished = Finished(app)
        self._ids: GroupCommit[str, str, UUID] = GroupCommit(self._derive, most=_MOST_AT_ONCE)
        self._functions: dict[str, Callable[[TakenJob], Awaitable[bytes]]] = {
            "subscribe_fanout": self._subscribe,
            "unsubscribe_fanout": self._unsubscribe,
            "fanout": self._fan_out,
        }
        if taken := set(self._expose) & {*self._functions, *self._forward}:
            raise InvalidInput(f"{min(taken)} cannot be exposed", hint="It is a function of the bridge, or forwarded.")
        if own := {*self._functions, name} & set(self._forward):
            raise InvalidInput(
                f"{min(own)} cannot be forwarded", hint="It is a function of the bridge, or the queue of its copies."
            )
        for exposed in self._expose:
            self._functions[exposed] = self._run_exposed
        self._deliveries = Deliveries(app, app.settings.concurrency, timeout, frozenset(self._functions))

    def stop(self) -> None:
        """Stop in an orderly way."""
        self._stop.set()

    async def serving(self) -> None:
        """Wait until the bridge accepts jobs, which it does as soon as a gearmand is connected."""
        await self._serving.wait()

    async def run(self) -> None:
        """Serve until `stop`. Raises `PenstockError` when the database refuses the bridge."""
        await self._declare()
        # Each type has its own worker, so that jobs which wait for a Gearman worker occupy no place that another type needs.
        workers = self.workers = [await self._app.worker(name) for name in (self.name, *self._forward)]
        self._wire = Wire(self._servers, f"penstock-{self.name}", list(self._functions), self._take, _MOST_AT_ONCE)
        self._deliveries.submitter = self._wire
        try:
            await self._serve(workers)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            for task in self._answering:
                task.cancel()
            self._deliveries.close()
            self._wire.close()

    async def _serve(self, workers: Sequence[Worker]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(worker.run(), name="penstock-gearman-worker")
            beside = [
                tasks.create_task(self._finished.run(), name="penstock-gearman-finished"),
                tasks.create_task(self._deliveries.run(), name="penstock-gearman-parked"),
            ]
            for worker in workers:
                await worker.started()
            self._serving.set()
            log.info("bridge_started", servers=[f"{s.host}:{s.port}" for s in self._servers], functions=sorted(self._functions))
            await self._stop.wait()
            self._wire.stop_taking()
            if self._answering:
                await asyncio.wait(self._answering, timeout=self._app.settings.shutdown_grace.total_seconds())
            for worker in workers:
                worker.stop()
            for task in beside:
                task.cancel()

    async def _declare(self) -> None:
        delivering = self._app.job(
            self.name,
            max_attempts=100,
            visibility_timeout=timedelta(minutes=2),
            backoff=Backoff(cap=timedelta(minutes=10)),
            keep_result=True,
        )(self._deliveries.deliver)
        await delivering.enqueue_many([])
        known = {record.name: record.options for record in await self._app.job_types()}
        for name in self._forward:
            options = known.get(name, Options(keep_result=True))
            self._app.job(
                name,
                delivery=options.delivery,
                max_attempts=options.max_attempts,
                concurrency=options.concurrency,
                visibility_timeout=options.visibility_timeout,
                time_limit=options.time_limit,
                backoff=options.backoff,
                rate_limit=options.rate_limit,
                keep_result=options.keep_result,
                max_waiting=options.max_waiting,
                max_crashes=options.max_crashes,
            )(self._forward_to_gearman)

    # -- from Gearman

    def _take(self, taken: TakenJob) -> None:
        task = asyncio.create_task(self._answer(taken), name=f"penstock-gearman-{taken.function}")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, taken: TakenJob) -> None:
        pause = 0.1
        while True:
            try:
                result = await self._functions[taken.function](taken)
            except DatabaseUnavailable as error:
                # gearmand keeps the job until the bridge answers.
                log.warning("gearman_job_waits", function=taken.function, error=error, retry_in_s=pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5.0)
            except PenstockError as error:
                log.info("gearman_job_refused", function=taken.function, error=error)
                return await taken.refuse(error.message)
            else:
                return await taken.complete(result)

    async def _subscribe(self, taken: TakenJob) -> bytes:
        request = _mapping(taken.arguments, "topic", "client_id")
        topic = Topic[Any](self._app.context, self._app.job, _text(request, "topic"), Any, None)
        client_id = _text(request, "client_id")
        if (function := f"{topic.name}_{client_id}") in self._functions:
            raise InvalidInput(f"{function} is a function of the bridge and cannot be a receiver")
        await topic.declare()
        ttl = request.get("ttl")
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 1 <= ttl <= 2_592_000):
            raise InvalidInput("ttl must be a number of seconds from 1 to 2,592,000")
        await topics.subscribe_many(
            await self._app.database(),
            topic.name,
            [client_id],
            ttl=None if ttl is None else timedelta(seconds=ttl),
            queue=self.name,
        )
        return b""

    async def _unsubscribe(self, taken: TakenJob) -> bytes:
        request = _mapping(taken.arguments, "topic", "client_id")
        topic, client_id = _text(request, "topic"), _text(request, "client_id")
        try:
            await topics.unsubscribe(await self._app.database(), topic, client_id)
        except NotFound:
            log.debug("gearman_unsubscribe_without_topic", topic=topic, client_id=client_id)
        return b""

    async def _fan_out(self, taken: TakenJob) -> bytes:
        request = _mapping(taken.arguments, "topic", "payload")
        topic = Topic[Any](self._app.context, self._app.job, _text(request, "topic"), Any, None)
        unique = request.get("unique")

        async def publish(id: UUID) -> Published:
            document = topics.publish_document(
                dump_json(request["payload"], topic.name),
                id,
                None if unique is None or unique == "" else plain_text(str(unique)),
                None,
                None,
                valid_traceparent(request.get("traceparent")),
            )
            return await topics.publish(await self._app.database(), topic.name, document)

        try:
            receipt = await self._under_its_id(taken, publish)
        except NotFound:
            return b"0"  # the topic never had a subscriber
        if request.get("background"):
            return b"0"
        return _count(await topic.outcomes(receipt, timeout=self._timeout))

    async def _run_exposed(self, taken: TakenJob) -> bytes:
        try:
            data = orjson.loads(taken.arguments) if taken.arguments else {}
        except orjson.JSONDecodeError:
            data = taken.arguments.decode("utf-8", "replace")
        receipt = await self._under_its_id(taken, lambda id: self._app.enqueue(taken.function, data, id=id))
        record = await self._finished.wait(receipt.id)
        if record.status is not Status.SUCCEEDED:
            message = record.errors[-1].get("message") if record.errors else None
            raise PenstockError(str(message or f"the job {record.status}"))
        return b"" if record.result is None else as_bytes(record.result)

    async def _under_its_id(self, taken: TakenJob, call: Callable[[UUID], Awaitable[T]]) -> T:
        """Make a call with the id of the Penstock job or message for a Gearman job.

        If possible the same when gearmand gives the job to another bridge after a crash: bridges of one role have the same ids,
        which no other role can find out.

        gearmand uses a handle again after a restart, but not the unique key, a UUID, that libgearman makes for each job.
        """
        try:
            unique = UUID(taken.unique)
        except ValueError:
            return await call(make_id())
        id = await self._ids.submit("", f"{taken.function} {unique} {taken.handle}")
        try:
            return await call(id)
        except Conflict as error:
            log.warning("gearman_id_taken", function=taken.function, id=str(id), error=error)
            return await call(make_id())

    async def _derive(self, _: str, texts: list[str]) -> list[UUID]:
        return await jobs.own_ids(await self._app.database(), f"gearman {self.name}", texts)

    # -- to Gearman

    async def _forward_to_gearman(self, job: Job[Any]) -> Any:
        return parsed(await self._wire.submit(job.name, as_bytes(job.data), str(job.id)))


class Finished:
    """Waits for many jobs at once, with one query for all of them."""

    def __init__(self, app: Penstock) -> None:
        self._app = app
        self._waiting: dict[UUID, asyncio.Future[JobRecord]] = {}
        self._arrived = asyncio.Event()

    async def wait(self, id: UUID) -> JobRecord:
        """Wait until a job is archived, and return it. Raises `NotFound` when it does not exist."""
        future = self._waiting.setdefault(id, asyncio.get_running_loop().create_future())
        self._arrived.set()
        return await asyncio.shield(future)

    async def run(self) -> None:
        """Query the jobs at intervals until cancelled."""
        pause = 0.01
        while True:
            await self._arrived.wait()
            try:
                pause = 0.01 if await self._look() else min(pause * 1.3, 0.25)
            except PenstockError as error:
                log.warning("look_failed", error=error)
            if not self._waiting:
                self._arrived.clear()
            await asyncio.sleep(pause)

    async def _look(self) -> bool:
        ids = list(self._waiting)
        found = await jobs.find(await self._app.database(), ids)
        done = False
        for id in ids:
            record = found.get(id)
            if record is None:
                self._waiting.pop(id).set_exception(NotFound(f"no such job: {id}"))
            elif record.status.finished:
                self._waiting.pop(id).set_result(record)
                done = True
        return done


def _mapping(arguments: bytes, *keys: str) -> dict[str, Any]:
    try:
        request = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(str(error)) from None
    if not isinstance(request, dict):
        raise InvalidInput("must be a mapping")
    if any(key not in request for key in keys):
        raise InvalidInput(f"must have {' and '.join(keys)} keys")
    return request


def _text(request: dict[str, Any], key: str) -> str:
    value = request[key]
    if not isinstance(value, str) or not storable_text(value):
        raise InvalidInput(f"{key} must be text")
    return value


def _count(receipt: Published) -> bytes:
    """The answer of gearhorn: the number of receivers. Raises `PenstockError` with the receivers that failed."""
    errors = [
        [outcome.client_id, "Worker failure" if outcome.status.finished else "Worker timeout"]
        for outcome in receipt.outcomes or []
        if outcome.status is not Status.SUCCEEDED
    ]
    if errors:
        raise PenstockError(json.dumps(errors))
    return str(receipt.receivers).encode()
