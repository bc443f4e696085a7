"""Background work on PostgreSQL: jobs, retries, limits, and workers, with the database as the only thing to run."""

from importlib import import_module
from typing import Any

from penstock._version import __version__
from penstock.public import DEFINED_IN

__all__ = [*DEFINED_IN, "__version__"]


def __getattr__(name: str) -> Any:
    module = DEFINED_IN.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
