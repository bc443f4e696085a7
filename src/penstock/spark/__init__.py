"""Spark, the data engine: a data source and sink, the history pipeline, bulk work, and workers on executors.

Needs the extra `spark` (and `jdk` where the machine has no Java). Only `session` and `register` are for applications; the
rest is used through `spark.read.format("penstock")` and through the commands `penstock history` and `penstock bulk`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.sessions import register, session

__all__ = ["register", "session"]


def __getattr__(name: str) -> Any:
    # Late, so that the pure parts (offsets, plan) and Spark's Python workers do not pay for a session.
    if name in __all__:
        return getattr(import_module("penstock.spark.sessions"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
