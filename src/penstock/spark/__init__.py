"""Operations on many rows run on Apache Spark: a data source and sink, the history pipeline, bulk work, and workers on executors.

The package needs the extra `spark` (and `jdk` where the machine has no Java). Applications call only `session` and `register`,
and use the rest through `spark.read.format("penstock")` and through the commands `penstock history` and `penstock bulk`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtra

if TYPE_CHECKING:
    from penstock.spark.sessions import register, session

__all__ = ["register", "session"]

if find_spec("pyspark") is None:
    raise MissingExtra("what reads and writes many rows", "spark,jdk", "pyspark")


def __getattr__(name: str) -> Any:
    # The import is late, so that the pure modules (offsets, plan) and Spark's Python workers do not load what a session needs.
    if name in __all__:
        return getattr(import_module("penstock.spark.sessions"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
