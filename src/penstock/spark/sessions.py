"""The Spark session: created with the settings that the data source needs, or given by the user.

All settings here can be set manually on any session; `register` alone is sufficient on a session of the user.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.extras import needs
from penstock.errors import Conflict, PenstockError
from penstock.spark.home import installed_modules
from penstock.spark.java import Java, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OF_CONNECT = ("pandas", "grpc", "grpc_status", "zstandard")
"""Modules that pyspark's client of Spark Connect needs, and pyspark does not bring."""
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def session(
    *,
    master: str | None = None,
    remote: str | None = None,
    app_name: str = "penstock",
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session on which `format("penstock")` works: the active one of this process, or a new one.

    Args:
        master: Master URL of Spark; None: `spark.master` of `config`, or `local[*]`.
        remote: URL of a Spark Connect server instead of a master, such as `sc://host:15002` or `local[*]`.
        app_name: Name of the application.
        config: Settings of Spark, which have precedence over those of Penstock. A session that runs already takes only those
            that can be changed while it runs.

    Raises:
        MissingExtra: pyspark is not installed, or what its client of Spark Connect needs.
        JavaNotFound: No usable Java was found (a remote server needs none here).
        Conflict: `remote` is given, and this process has a session of another kind: a process has one of the two.
    """
    with needs("spark,jdk", "a session of Spark"):
        import pyspark  # noqa: F401
    if remote is not None:
        with needs("pipelines", "a session of Spark Connect"):
            for module in _OF_CONNECT:
                importlib.import_module(module)
    from pyspark.sql import SparkSession

    given = dict(config or {})
    active = SparkSession.getActiveSession()
    if remote is not None and active is not None and not type(active).__module__.startswith("pyspark.sql.connect"):
        raise Conflict(
            f"this process has a session of Spark itself, and cannot connect to {remote}",
            hint="Stop that session before (spark.stop()), use it (leave remote out), or connect in another process.",
        )
    if active is None:
        if remote is not None:
            active = _connected(remote, app_name, given)
        else:
            active = _started(master or given.get("spark.master") or "local[*]", app_name, given)
    else:
        for name, value in given.items():
            if active.conf.isModifiable(name):
                active.conf.set(name, value)
    register(active)
    return active


def register(spark: SparkSession) -> None:
    """Make `format("penstock")` known to a session, with filter pushdown and the session's time zone.

    Spark discovers the format where the package is installed for the Python of the driver; registering it also serves a server
    (Spark Connect) that does not have the package on its path. Spark does not tell a format in Python the session's time zone,
    so the present one becomes the default of the option `timeZone`: register again when it changes.
    """
    from penstock.spark.source import in_zone

    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(in_zone(str(spark.conf.get("spark.sql.session.timeZone"))))


def settings_for(master: str, java: Java | None = None) -> dict[str, str]:
    """The settings of a new session, which those of the caller override."""
    chosen = {
        PUSHDOWN: "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    }
    options = " ".join(java.options) if java else ""
    if master.startswith("local"):
        parallel = max(2, os.cpu_count() or 2)
        chosen |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": str(parallel),
            "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / f"penstock-warehouse-{os.getpid()}"),
            # On a local disk the default one starts the program chmod, which takes a third of the time of a small batch.
            "spark.sql.streaming.checkpointFileManagerClass": (
                "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
            ),
        }
    if options:
        chosen["spark.driver.extraJavaOptions"] = options
        chosen["spark.executor.extraJavaOptions"] = options
    return chosen


def _started(master: str, app_name: str, given: dict[str, str]) -> SparkSession:
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Otherwise local-cluster writes the folders of its workers into the installed package.
        os.environ.setdefault("SPARK_WORKER_DIR", tempfile.gettempdir())
    settings = {**settings_for(master, java), **given}
    builder = SparkSession.builder.master(master).appName(app_name)
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        with installed_modules(settings) if master.startswith("local") else nullcontext():
            spark = builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise PenstockError(
            f"Spark did not start on Java {'.'.join(map(str, java.version))} from {java.origin} ({java.home}): {error}",
            hint="Spark's own message is printed above. Choose another Java with JAVA_HOME.",
        ) from error
    if "spark.log.level" not in given:
        spark.sparkContext.setLogLevel("ERROR")
    return spark


def _connected(remote: str, app_name: str, given: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote(remote).appName(app_name)
    if remote.startswith("local"):
        # The server runs on this machine, with a JVM and Python workers of its own.
        java = find_java()
        os.environ["JAVA_HOME"] = str(java.home)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        if java.options:
            builder = builder.config("spark.driver.extraJavaOptions", " ".join(java.options))
    for name, value in given.items():
        builder = builder.config(name, value)
    with installed_modules(given) if remote.startswith("local") else nullcontext():
        return builder.getOrCreate()
