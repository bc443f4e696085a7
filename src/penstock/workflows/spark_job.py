"""Job types whose jobs are Spark jobs: declared here, and run by a driver of their own that a worker starts and watches.

A worker starts a process for each job (`penstock.spark.driver`), which is the driver of one Spark session. Both talk over a
connection on this machine: the driver gets the job, and sends the progress of its stages, lines of its log, and how it ended. The
worker extends the lease as long as the driver lives. When the worker dies, the connection ends, and so does the driver. What a
driver that lives on nevertheless writes to Penstock's sinks is refused, since the lease for which it was started does not hold
the job any more (`penstock.require_attempt`).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import signal
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, overload

import orjson
from typing_extensions import Unpack

from penstock.core.checks import check_many, check_span, check_text
from penstock.core.dependencies import Plan, inject, overrides_in, signature_of
from penstock.core.logs import get_logger
from penstock.core.serialization import Codec
from penstock.core.user_code import check_no_generator, is_async
from penstock.errors import Conflict, InvalidInput
from penstock.jobs.declarations import JobDeclarations, JobOptions, options_of
from penstock.jobs.handler import Handler, Job, check_importable
from penstock.jobs.job_type import JobType
from penstock.jobs.signature import Signature, signature_of_handler
from penstock.jobs.spark_attempt import FENCE, SparkAttempt
from penstock.postgres.context import Context

log = get_logger("penstock.worker")
ADDRESS = "PENSTOCK_SPARK_WORKER"
"""Environment variable with port and token of the worker that started a driver."""
SUBMIT = "PENSTOCK_SPARK_SUBMIT"
"""Environment variable with arguments of spark-submit, as JSON, by which the driver is to be started."""
_OF_SPARK = ("script", "payload", "master", "remote", "submit", "config", "grace", "key")
_LONGEST_LINE = 16 * 1024 * 1024
_CONNECTS_S = 120.0


SparkDecorator: TypeAlias = Callable[[Callable[..., Any]], JobType[...]]
"""Declares the function of a Spark job."""


@dataclass(frozen=True, slots=True)
class SparkSession:
    """Where a Spark job runs.

    Attributes:
        master: Master URL of Spark; None: `local[*]`.
        remote: URL of a Spark Connect server; None: the driver has Spark itself.
        submit: Arguments of spark-submit, which starts the driver; None: it is not used.
        config: Settings of Spark.
    """

    master: str | None = None
    remote: str | None = None
    submit: tuple[str, ...] | None = None
    config: Mapping[str, str] | None = None


def spark_session() -> Any:
    """Stands for the session in the signature of a function. The driver fills it."""
    raise Conflict("there is no session of Spark in this process", hint="A worker starts a driver for each Spark job.")


def signature_of_spark_job(function: Callable[..., Any]) -> tuple[Signature, Handler]:
    """How a function of a session takes its job, and the function as one of the job and its dependencies.

    Raises:
        InvalidInput: A parameter cannot be filled, or there is none for the session.
    """
    annotations = getattr(function, "__annotations__", None)
    if annotations and (parameters := signature_of(function).parameters):
        # Where only jobs are enqueued, the class of the session may not be there.
        annotations.pop(next(iter(parameters)), None)
    return signature_of_handler(inject(spark_session)(function), blocking=True)


class SparkJobDeclarations(JobDeclarations):
    """Declares Spark jobs."""

    @overload
    def spark_job(
        self,
        name: str,
        *,
        script: str | Path,
        payload: Any = Any,
        master: str | None = None,
        remote: str | None = None,
        submit: Sequence[str] | None = None,
        config: Mapping[str, str] | None = None,
        grace: timedelta = timedelta(seconds=20),
        key: str | Callable[[Any], str | None] | None = None,
        **options: Unpack[JobOptions],
    ) -> JobType[...]: ...
    @overload
    def spark_job(
        self,
        name: str,
        *,
        script: None = None,
        master: str | None = None,
        remote: str | None = None,
        submit: Sequence[str] | None = None,
        config: Mapping[str, str] | None = None,
        grace: timedelta = timedelta(seconds=20),
        key: str | Callable[[Any], str | None] | None = None,
        **options: Unpack[JobOptions],
    ) -> SparkDecorator: ...
    def spark_job(
        self,
        name: str,
        *,
        script: str | Path | None = None,
        payload: Any = Any,
        master: str | None = None,
        remote: str | None = None,
        submit: Sequence[str] | None = None,
        config: Mapping[str, str] | None = None,
        grace: timedelta = timedelta(seconds=20),
        key: str | Callable[[Any], str | None] | None = None,
        **options: Unpack[JobOptions],
    ) -> Any:
        """Declare a job type whose jobs are Spark jobs: by a script, or as a decorator by a function.

            rollup = app.spark_job("rollup", script="jobs/rollup.py")

            @app.spark_job("count-flights", keep_result=True)
            def count_flights(spark: SparkSession, day: str) -> int: ...

        A worker starts a driver for each job, in a process of its own. The first parameter of a function takes the session; the
        others are those of a handler, see `Penstock.job`. A script finds the session by `SparkSession.builder.getOrCreate()` and
        the job by `current_job()`. The progress of the stages is that of the job, a cancellation cancels what Spark runs, and
        what a retry writes to Penstock's sinks counts once; docs/workflows.md has the rest.

        Args:
            name: Name of the type.
            script: Path of a Python file; None: a function is decorated.
            payload: Type of the payloads of a script.
            master: Master URL of Spark; None: `local[*]`.
            remote: URL of a Spark Connect server instead of a master, such as `sc://host:15002`.
            submit: Arguments of spark-submit, in client mode, by which the driver is started; None: without it.
            config: Settings of Spark for the session.
            grace: How long a driver may take to end after a cancellation, before it is killed.
            key: See `Penstock.job`.
            options: As for `Penstock.job`; `concurrency` is 1 unless given.

        Raises:
            InvalidInput: The script, the function or an option cannot be used.
        """
        chosen = options_of(name, {"concurrency": 1, **options}, _OF_SPARK)
        if sum(given is not None for given in (master, remote, submit)) > 1:
            raise InvalidInput(f"master, remote and submit of {name} exclude each other", hint="Give one of them.")
        for what, text in (("master", master), ("remote", remote)):
            if text is not None:
                check_text(f"{what} of {name}", text)
        if submit is not None:
            check_many(f"submit of {name}", submit, 'submit=["--master", "yarn"]')
        check_span(f"grace of {name}", grace, zero=True)
        session = SparkSession(master, remote, None if submit is None else tuple(submit), dict(config or {}))
        declared: JobType[Any] = JobType(self.context, name, payload if script is not None else Any, chosen, key)
        if script is not None:
            path = Path(script)
            if not path.is_file():
                raise InvalidInput(f"there is no script {path}", hint="Give the path of a Python file, as seen from this folder.")
            self._runs(declared, _function_of(path), Signature(payload), {"script": str(path.resolve())}, session, grace)
            return self.add_type(declared)

        def declare(function: Callable[..., Any]) -> JobType[...]:
            signature, _ = signature_of_spark_job(function)
            check_no_generator(function, f"the function of {name}")
            if is_async(function):
                raise InvalidInput(f"the function of {name} is async", hint="Make it a plain def: Spark blocks.")
            plan = signature.plan
            # Its dependencies are made in the driver.
            signature = replace(signature, plan=Plan({}))
            self._runs(declared, function, signature, _place_of(function), session, grace, plan)
            return self.add_type(declared)

        return declare

    def _runs(
        self,
        declared: JobType[Any],
        function: Callable[..., Any],
        signature: Signature,
        what: Mapping[str, str],
        session: SparkSession,
        grace: timedelta,
        plan: Plan | None = None,
    ) -> None:
        runner = SparkRunner(self.context, declared, signature.payload, what, session, grace, plan)

        async def handle(job: Job[Any], /) -> Any:
            return await runner.run(job)

        declared.handled_as(function, signature, handle, "async")


class SparkRunner:
    """Runs the jobs of one type, each in a driver.

    Args:
        context: Settings of the application, which say where the database is.
        type: The job type.
        payload: Type of its payloads.
        what: The script, or module and name of the function.
        session: Where it runs.
        grace: How long a driver may take to end after a cancellation.
        plan: Dependencies of the function; None: a script has none.
    """

    def __init__(
        self,
        context: Context,
        type: JobType[Any],
        payload: Any,
        what: Mapping[str, str],
        session: SparkSession,
        grace: timedelta,
        plan: Plan | None = None,
    ) -> None:
        self._context = context
        self._type = type
        self._codec: Codec[Any] = Codec(payload, type.name)
        self._what = what
        self._session = session
        self._grace_s = grace.total_seconds()
        self._plan = plan

    async def run(self, job: Job[Any]) -> Any:
        """Run a job. Returns what its function returned.

        Raises:
            Exception: What the function raised, or an exception of the same name.
        """
        task = orjson.dumps(self._task(job))
        token = secrets.token_hex(16)
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, ValueError):
                given = (await reader.readline()).decode().strip()
                if secrets.compare_digest(given, token) and not connected.done():
                    connected.set_result((reader, writer))
                    return
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=_LONGEST_LINE)
        process: asyncio.subprocess.Process | None = None
        try:
            address = f"{server.sockets[0].getsockname()[1]}:{token}"
            process = await self._start(job, address)
            log.info("spark_driver_started", driver=process.pid)
            watching = asyncio.create_task(process.wait(), name="penstock-spark-driver")
            async with asyncio.timeout(_CONNECTS_S):
                first: list[asyncio.Future[Any]] = [watching, connected]
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                raise RuntimeError(f"the driver of Spark ended with code {process.returncode}; its output says why")
            reader, writer = connected.result()
            writer.write(task + b"\n")
            try:
                try:
                    return await self._follow(job, reader)
                except asyncio.CancelledError:
                    if _reason(job) != "cancelled":
                        # Others may start the job at any moment: the driver has no time.
                        self._kill(process)
                        raise
                    writer.write(orjson.dumps({"cancel": True}) + b"\n")
                    raise
                finally:
                    # It stops its session.
                    await asyncio.wait([watching], timeout=self._grace_s)
            finally:
                writer.close()
        finally:
            server.close()
            if process is not None:
                self._kill(process)

    @staticmethod
    def _kill(process: asyncio.subprocess.Process) -> None:
        """End a driver with all that it has started. What is left of a session whose driver has ended may clean up."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL if process.returncode is None else signal.SIGTERM)

    async def _start(self, job: Job[Any], address: str) -> asyncio.subprocess.Process:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path or str(Path.cwd()) for path in sys.path)),
            "PENSTOCK_DATABASE_URL": await self._context.start_server(),
            ADDRESS: address,
            FENCE: SparkAttempt(job.id, job.attempt, _lease(job), secrets.token_hex(8)).as_json(),
        }
        if self._session.submit is not None:
            # Some settings cannot be changed in a session that has begun.
            environment[SUBMIT] = orjson.dumps({"arguments": self._session.submit, "config": self._session.config}).decode()
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.spark.driver", stdin=asyncio.subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def _task(self, job: Job[Any]) -> dict[str, Any]:
        return {
            "job": {
                "id": str(job.id), "name": job.name, "key": job.key, "attempt": job.attempt, "max_attempts": job.max_attempts,
                "created_at": job.created_at.isoformat(), "snoozes": job.snoozes, "lease": job.lease,
            },
            "data": self._codec.dump(job.data), **self._what, "master": self._session.master, "remote": self._session.remote,
            "submitted": self._session.submit is not None, "config": self._session.config, "overrides": self._overrides(),
        }  # fmt: skip

    def _overrides(self) -> str | None:
        """The functions that stand in for dependencies, for the driver, which has only what the code of the application says."""
        overrides = {} if self._plan is None else overrides_in(self._plan, self._context.hooks.dependency_overrides, (Job,))
        if not overrides:
            return None
        for function in (*overrides, *overrides.values()):
            check_importable(function, "Define it in a module, outside of functions and objects: the driver imports it.")
        return b64encode(pickle.dumps(overrides)).decode()

    async def _follow(self, job: Job[Any], reader: asyncio.StreamReader) -> Any:
        """Pass on what the driver reports, and keep the job, until the driver says how it ended."""
        extending = None if self._type.declared.time_limit is not None else asyncio.create_task(self._extend(job))
        reading = asyncio.create_task(_read(job, reader), name="penstock-spark-reports")
        tasks = [reading] if extending is None else [reading, extending]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if extending is not None and extending.done():
                # The job belongs to another worker by now.
                await extending
            return await reading
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _extend(self, job: Job[Any]) -> None:
        while True:
            await asyncio.sleep(self._type.declared.visibility_timeout.total_seconds() / 4)
            await job.extend()


async def _read(job: Job[Any], reader: asyncio.StreamReader) -> Any:
    while line := await reader.readline():
        message = orjson.loads(line)
        if "progress" in message:
            job.progress(message["progress"])
        elif "log" in message:
            job.log(message["log"])
        elif "error" in message:
            raise _error_of(message["error"])
        else:
            return message["result"]
    raise RuntimeError("the driver of Spark ended without a result; its output says why")


def _error_of(error: Mapping[str, str]) -> Exception:
    if "pickled" in error:
        # Of the same code, by a process of the same user.
        found: Exception = pickle.loads(b64decode(error["pickled"]))  # noqa: S301
        return found
    # Its class may not exist here, as those of Spark; what is recorded of it is its name.
    raised: Exception = type(error["type"], (Exception,), {})(error["message"])
    return raised


def _lease(job: Job[Any]) -> int:
    """The lease of the claim, by which what the driver writes is fenced."""
    control: Any = job.control
    return int(control.claimed.lease)


def _reason(job: Job[Any]) -> str | None:
    return getattr(job.control, "reason", None)


def _place_of(function: Callable[..., Any]) -> dict[str, str]:
    """Where a driver finds a function."""
    module, name = function.__module__, function.__qualname__
    if "<locals>" in name:
        raise InvalidInput(f"{name} is a function within a function", hint="A driver imports it: define it in a module.")
    if module == "__main__" and (file := getattr(sys.modules["__main__"], "__file__", None)):
        return {"file": str(Path(file).resolve()), "function": name}
    return {"module": module, "function": name}


def _function_of(script: Path) -> Callable[..., Any]:
    def run() -> None:
        raise Conflict(f"{script} is a script of Spark", hint="Enqueue a job of it, or run it with spark-submit.")

    return run
