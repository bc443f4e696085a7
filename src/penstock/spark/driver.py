"""The driver of a Spark job: a process that a worker starts for one job, and that ends with its worker.

`python -m penstock.spark.driver` connects to the worker, gets the job, makes the session, and calls the function or runs the
script. Meanwhile threads report the progress of the stages, and wait for the worker: when it says so, what Spark runs is
cancelled, and when it is gone, the process ends at once. With arguments for spark-submit the process becomes spark-submit, which
starts this module again.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import runpy
import shutil
import socket
import sys
import tempfile
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson

from penstock.core.dependencies import Solver
from penstock.core.logs import get_logger
from penstock.core.serialization import Codec, dump_json
from penstock.core.user_code import message_of
from penstock.errors import Conflict, InvalidInput, PenstockError
from penstock.jobs.group_record import JobGroupRecord
from penstock.jobs.handler import Job, set_current_job
from penstock.jobs.job_type import JobType
from penstock.jobs.steps import StepControl
from penstock.workflows.spark_job import ADDRESS, SUBMIT, signature_of_spark_job, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = get_logger("penstock.spark")
_LOOK_EVERY_S = 0.5
_MOST_STAGES = 8
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}
ORPHANED = 75
"""Exit code of a driver whose worker is gone."""


class Channel:
    """The connection to the worker: lines of JSON in both directions.

    Args:
        address: Port of the worker on this machine, and the token that says who connects.
    """

    def __init__(self, address: str) -> None:
        port, _, token = address.partition(":")
        self._socket = socket.create_connection(("127.0.0.1", int(port)))
        self._lines = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self._socket.sendall(f"{token}\n".encode())

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. A worker that is gone is noticed where messages are received."""
        with self._lock, suppress(OSError):
            self._socket.sendall(orjson.dumps(message) + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None: the worker is gone."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        return orjson.loads(line) if line else None


class DriverControl:
    """What a Spark job can ask of its worker: the `JobControl` of its `Job`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stages: dict[str, Any] = {}
        self._reported: Any = None
        self._cancelled = threading.Event()
        self.spark: Any = None

    async def extend(self, duration: timedelta | None) -> None:
        """The worker extends the lease as long as the driver lives."""

    def extend_blocking(self, duration: timedelta | None) -> None:
        """See `extend`."""

    def progress(self, value: Any) -> None:
        """Report a value beside the progress of the stages."""
        self._reported = orjson.loads(dump_json(value, "the progress of a Spark job"))
        self._send()

    def stages(self, stages: dict[str, Any]) -> None:
        """Report the progress of the stages, when it has changed."""
        if stages != self._stages:
            self._stages = stages
            self._send()

    def _send(self) -> None:
        reported = {} if self._reported is None else {"reported": self._reported}
        self._channel.send({"progress": {**self._stages, **reported}})

    def log(self, line: str) -> None:
        """Add a line to the log of the job."""
        if not isinstance(line, str):
            raise InvalidInput(f"a line of a job's log is text, not {line!r:.100}")
        self._channel.send({"log": line})

    async def finish(self, connection: Any, result: Any) -> None:
        """Not possible from a driver."""
        raise Conflict("a Spark job cannot finish itself in a transaction", hint="Return its result instead.")

    async def group(self) -> JobGroupRecord | None:
        """Not possible from a driver."""
        raise Conflict("a Spark job does not know its job group", hint="Ask the application: await app.group_of(job.id).")

    def group_blocking(self) -> JobGroupRecord | None:
        """Not possible from a driver."""
        raise Conflict("a Spark job does not know its job group", hint="Ask the application: app.sync.group_of(job.id).")

    def steps(self) -> StepControl:
        """Not possible from a driver."""
        raise Conflict("a Spark job has no durable steps", hint="Make what it does several steps of a graph: app.workflow(...).")

    @property
    def cancelled(self) -> bool:
        """Whether the job was cancelled."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Note that the job was cancelled."""
        self._cancelled.set()


def main() -> None:
    """Run the job of this process."""
    if (arguments := os.environ.pop(SUBMIT, None)) is not None:
        given = orjson.loads(arguments)
        _submit(given["arguments"], given["config"])
    channel = Channel(os.environ.pop(ADDRESS))
    task = channel.receive()
    if task is None:
        os._exit(ORPHANED)
    control = DriverControl(channel)
    try:
        threading.Thread(target=_listen, args=(channel, control), name="penstock-worker", daemon=True).start()
        control.spark = spark = _session(task, control)
        if control.cancelled:
            raise Conflict("the job was cancelled before it started")
        threading.Thread(target=_report, args=(spark, control), name="penstock-stages", daemon=True).start()
        result = _run(task, spark, control)
        text = "null" if result is None else dump_json(result, f"the result of {task['job']['name']}")
        channel.send({"result": orjson.Fragment(text)})
    except BaseException as error:
        log.error("spark_job_failed", exc_info=error)
        channel.send({"error": _described(error)})
    with suppress(Exception):
        control.spark.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of Spark, and what the job has left running, do not keep the process; the JVM ends with it.
    os._exit(0)


def _submit(arguments: list[str], config: Mapping[str, Any]) -> None:
    """Become spark-submit, which starts this module. Settings go through a file: other users can read a command line."""
    from penstock.spark.java import find_java

    beside = Path(sys.executable).parent / "spark-submit"
    home = os.environ.get("SPARK_HOME")
    program = f"{home}/bin/spark-submit" if home else str(beside) if beside.exists() else shutil.which("spark-submit")
    if program is None:
        raise PenstockError("there is no spark-submit on this machine", hint="Set SPARK_HOME, or install pyspark.")
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        os.environ.setdefault(name, sys.executable)
    # The file has a folder of its own: that of this module would hide modules of Python by those of its names.
    main_file = Path(tempfile.mkdtemp(prefix="penstock-spark-")) / "penstock_driver.py"
    main_file.write_text(
        "import shutil\nfrom pathlib import Path\n\nshutil.rmtree(Path(__file__).parent)\n\n"
        "from penstock.spark.driver import main\n\nmain()\n"
    )
    options = ["--driver-java-options", " ".join(java.options)] if java.options else []
    others, settings = settings_of(arguments)
    # The folder is closed to others, and goes when the driver starts.
    properties = main_file.with_name("penstock.conf")
    properties.write_text(settings + "".join(property_line(name, str(value)) for name, value in config.items()), "utf-8")
    options += ["--properties-file", str(properties), "--load-spark-defaults"]
    os.execv(program, [program, *options, *others, str(main_file)])  # noqa: S606 - as the application declared it


def settings_of(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Arguments of spark-submit without the settings among them, and the settings as lines of a file.

    Raises:
        InvalidInput: A setting has no value, or a file of settings cannot be read.
    """
    others: list[str] = []
    of_file, lines = "", ""
    left = iter(arguments)
    for argument in left:
        name, joined, value = argument.partition("=")
        if name not in ("--conf", "-c", "--properties-file"):
            others.append(argument)
            continue
        value = value if joined else next(left, "")
        if name == "--properties-file":
            try:
                of_file = Path(value).read_text("utf-8")
            except (OSError, UnicodeError) as error:
                raise InvalidInput(f"the file of settings {value} cannot be read: {type(error).__name__}") from None
            continue
        setting, given, text = value.partition("=")
        if not given:
            raise InvalidInput(f"{name} {setting} of spark-submit has no value", hint="Write --conf NAME=VALUE.")
        lines += property_line(setting.strip(), text.strip())
    # Of a name that is there twice, the last counts.
    return others, f"{of_file}\n{lines}" if of_file else lines


def property_line(name: str, value: str) -> str:
    """A line of a file of Java's properties."""
    escaped = [re.sub(r"[\\\s:=#!]", lambda found: _ESCAPES.get(found[0], f"\\{found[0]}"), text) for text in (name, value)]
    return f"{escaped[0]}={escaped[1]}\n"


def _session(task: dict[str, Any], control: DriverControl) -> SparkSession:
    from penstock.spark.sessions import register, session

    named = f"penstock {task['job']['name']} {task['job']['id']}"
    if task["submitted"]:
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.getOrCreate()
        register(spark)
    else:
        spark = session(master=task["master"], remote=task["remote"], app_name=named, config=task["config"])
    if task["remote"] is None:
        spark.sparkContext.setJobGroup(f"job {task['job']['id']}", named, interruptOnCancel=True)
    else:
        spark.addTag(named.replace(" ", "-"))
        connect: Any = spark
        connect.registerProgressHandler(lambda stages, **_: control.stages(_of_connect(stages)))
    return spark


def _run(task: dict[str, Any], spark: SparkSession, control: DriverControl) -> Any:
    given = task["job"]

    def job_with(data: Any) -> Job[Any]:
        created_at = datetime.fromisoformat(given["created_at"])
        job: Job[Any] = Job(
            UUID(given["id"]), given["name"], given["key"], given["attempt"], given["max_attempts"], data, created_at, control,
            given["snoozes"], lease=given["lease"],
        )  # fmt: skip
        set_current_job(job)
        return job

    if (script := task.get("script")) is not None:
        job_with(Codec[Any](Any, given["name"]).load(task["data"]))
        sys.argv = [script]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
        return None
    found = _found(task)
    function: Any = found.function if isinstance(found, JobType) else found
    signature, handler = signature_of_spark_job(function)
    job = job_with(Codec[Any](signature.payload, given["name"]).load(task["data"]))
    # By the worker of this job, a process of the same user.
    overrides = {} if task["overrides"] is None else pickle.loads(b64decode(task["overrides"]))  # noqa: S301
    solver = Solver({Job: job}, {spark_session: lambda: spark, **overrides})
    return solver.call_blocking(signature.plan, lambda dependencies: handler(job, **dependencies))


def _found(task: dict[str, Any]) -> Any:
    names = task["function"].split(".")
    if "file" in task:
        return reduce(getattr, names[1:], runpy.run_path(task["file"], run_name="__penstock_main__")[names[0]])
    return reduce(getattr, names, importlib.import_module(task["module"]))


def _listen(channel: Channel, control: DriverControl) -> None:
    """Wait for the worker: for its word that the job is cancelled, and for its end."""
    while (message := channel.receive()) is not None:
        if message.get("cancel"):
            control.cancel()
            with suppress(Exception):
                _cancel_all(control.spark)
    print("the worker of this driver is gone: the driver ends", file=sys.stderr, flush=True)
    os._exit(ORPHANED)


def _cancel_all(spark: Any) -> None:
    """Cancel what Spark runs, in whichever thread of the job."""
    # Only a session of Spark Connect can do it.
    with suppress(Exception):
        spark.interruptAll()
    from pyspark import SparkContext

    if (context := SparkContext._active_spark_context) is not None:
        context.cancelAllJobs()


def _report(spark: SparkSession, control: DriverControl) -> None:
    """Report the progress of the stages of a session with a driver of its own. Spark Connect tells by itself."""
    try:
        tracker = spark.sparkContext.statusTracker()
    except Exception:
        return
    seen: set[int] = set()
    while True:
        with suppress(Exception):
            active = list(tracker.getActiveStageIds())
            seen |= set(active)
            stages = [info for id in sorted(active)[:_MOST_STAGES] if (info := tracker.getStageInfo(id)) is not None]
            if seen:
                control.stages({
                    "stages": len(seen), "stages_done": len(seen) - len(active),
                    "active": [
                        {"stage": one.stageId, "name": one.name, "tasks": one.numTasks, "done": one.numCompletedTasks}
                        for one in stages
                    ],
                })  # fmt: skip
        time.sleep(_LOOK_EVERY_S)


def _of_connect(stages: Any) -> dict[str, Any]:
    listed = list(stages)
    left = [one for one in listed if one.num_completed_tasks < one.num_tasks]
    return {
        "stages": len(listed), "stages_done": len(listed) - len(left),
        "active": [
            {"stage": one.stage_id, "tasks": one.num_tasks, "done": one.num_completed_tasks} for one in left[:_MOST_STAGES]
        ],
    }  # fmt: skip


def _described(error: BaseException) -> dict[str, str]:
    """An error as the worker gets it: Penstock's own as they are, of others the name and the message."""
    if isinstance(error, PenstockError):
        with suppress(Exception):
            return {"pickled": b64encode(pickle.dumps(error)).decode()}
    return {"type": type(error).__name__, "message": message_of(error)}


if __name__ == "__main__":
    main()
