"""What a Python process of Spark does with what it has imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import gc
from penstock.spark.source import PenstockSource
PenstockSource({})
print(gc.get_freeze_count())
"""


@pytest.mark.parametrize(("environment", "spared"), [({"PYTHON_WORKER_FACTORY_SECRET": "s"}, True), ({}, False)])
def test_only_a_process_of_spark_spares_its_modules_the_garbage_collection(environment: dict[str, str], spared: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) > 10_000) is spared, done.stdout
