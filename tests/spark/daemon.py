"""The process from which Spark forks the Python processes of its tasks, with what these import imported already.

A task that fails takes its Python process with it, and a minute without tasks all of them: the tests would spend more time on the
imports of these processes than on what these do.
"""

from __future__ import annotations

import gc

import adbc_driver_postgresql.dbapi  # noqa: F401
import pyspark.daemon
import pyspark.worker

import penstock.spark.source  # noqa: F401

if __name__ == "__main__":
    # Each process collects garbage after each task.
    gc.freeze()
    pyspark.daemon.manager()
