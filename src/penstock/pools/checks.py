"""Checks of the options of a pool, before they reach the database. The errors name the option and its value."""

from __future__ import annotations

import inspect
from typing import Any

from penstock.core.checks import check_mapping, check_number, check_text
from penstock.errors import InvalidInput
from penstock.jobs.checks import check_rate
from penstock.jobs.options import PoolOptions

_MOST_AHEAD = 10_000


def check_pool(name: str, options: PoolOptions, assign: Any) -> None:
    """Raise `InvalidInput` unless the options of a pool are valid."""
    check_number(f"slots of {name}", options.slots, 1, 65_536)
    check_number(f"key_concurrency of {name}", options.key_concurrency, 1, 10_000)
    check_number(f"prefetch_per_key of {name}", options.prefetch_per_key, 1, _MOST_AHEAD)
    if options.key_max_waiting is not None:
        check_number(f"key_max_waiting of {name}", options.key_max_waiting, 1, 2**31 - 1)
    check_rate(f"key_rate of {name}", options.key_rate)
    if assign is not None and (not callable(assign) or inspect.iscoroutinefunction(assign)):
        raise InvalidInput(
            f"assign of {name} must be a plain function, not {assign!r}",
            hint="assign(key, workers) returns the place of a worker.",
        )
    if options.assignor not in ("sticky", "jump"):
        raise InvalidInput(
            f"unknown assignor of {name}: {options.assignor!r}", hint="Use sticky or jump, or give a rule with assign=."
        )
    if options.on_retry not in ("block", "skip"):
        raise InvalidInput(f"on_retry of {name} must be block or skip, not {options.on_retry!r}")
    check_mapping(f"weights of {name}", options.weights, '{"acme": 3}')
    for key, weight in options.weights.items():
        check_text(f"a key in weights of {name}", key)
        check_number(f"the weight of {key!r} in {name}", weight, 1, 1_000)
