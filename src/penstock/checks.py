"""What is declared is checked where it is written, by name and value, before it reaches the database."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from penstock.errors import InvalidInput
from penstock.job import Backoff, Options, RateLimit

_MOST_AHEAD = 10_000


def check_options(name: str, options: Any) -> None:
    """Raise `InvalidInput` unless these are the options of a job type, each of its kind."""
    if not isinstance(options, Options):
        raise InvalidInput(f"options of {name} must be Options, not {options!r}", hint="For example: options=Options(attempts=3)")
    if not isinstance(options.backoff, Backoff):
        raise InvalidInput(
            f"backoff of {name} must be a Backoff, not {options.backoff!r}",
            hint="For example: Backoff(base=timedelta(seconds=2))",
        )
    for option in ("attempts", "concurrency"):
        if (value := getattr(options, option)) is not None:
            check_number(f"{option} of {name}", value, 0 if option == "concurrency" else 1, 2**31 - 1)
    check_rate(f"rate_limit of {name}", options.rate_limit)
    if not isinstance(options.keep_result, bool):
        raise InvalidInput(f"keep_result of {name} must be True or False, not {options.keep_result!r}")


def check_pool(
    name: str,
    slots: Any,
    assign: Any,
    assignor: Any,
    on_retry: Any,
    key_concurrency: Any,
    key_rate: Any,
    weights: Any,
    run_ahead: Any,
) -> None:
    """Raise `InvalidInput` unless a pool can be declared so."""
    check_number(f"slots of {name}", slots, 1, 65_536)
    check_number(f"key_concurrency of {name}", key_concurrency, 1, 10_000)
    check_number(f"run_ahead of {name}", run_ahead, 1, _MOST_AHEAD)
    check_rate(f"key_rate of {name}", key_rate)
    if assign is not None and (not callable(assign) or inspect.iscoroutinefunction(assign)):
        raise InvalidInput(
            f"assign of {name} must be a plain function, not {assign!r}",
            hint="assign(key, workers) returns the place of a worker.",
        )
    if assignor not in ("sticky", "jump"):
        raise InvalidInput(f"unknown assignor of {name}: {assignor!r}", hint="Use sticky or jump, or give a rule with assign=.")
    if on_retry not in ("block", "skip"):
        raise InvalidInput(f"on_retry of {name} must be block or skip, not {on_retry!r}")
    if weights is not None:
        check_mapping(f"weights of {name}", weights, '{"acme": 3}')
        for key, weight in weights.items():
            check_number(f"the weight of {key!r} in {name}", weight, 1, 1_000)


def check_number(what: str, value: Any, low: int, high: int) -> None:
    """Raise `InvalidInput` unless it is an integer in this range."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidInput(f"{what} must be an integer from {low:,} to {high:,}, not {value!r}")


def check_rate(what: str, value: Any) -> None:
    """Raise `InvalidInput` unless it is a rate, or None."""
    hint = "For example: RateLimit(10, timedelta(seconds=1))"
    if value is None:
        return
    if not isinstance(value, RateLimit):
        raise InvalidInput(f"{what} must be a RateLimit, not {value!r}", hint=hint)
    if not isinstance(value.period, timedelta):
        raise InvalidInput(f"the period of {what} must be a timedelta, not {value.period!r}", hint=hint)
    check_number(f"the limit of {what}", value.limit, 1, 2**31 - 1)


def check_mapping(what: str, value: Any, example: str) -> None:
    """Raise `InvalidInput` unless it is a mapping with text as keys."""
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        raise InvalidInput(f"{what} must be a mapping by text, not {value!r:.100}", hint=f"For example: {example}")


def check_flag(what: str, value: Any) -> None:
    """Raise `InvalidInput` unless it is True or False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{what} must be True or False, not {value!r:.100}")


def check_span(what: str, value: Any, *, zero: bool = False) -> None:
    """Raise `InvalidInput` unless it is a span of time that is longer than nothing (`zero`: or nothing)."""
    if not isinstance(value, timedelta) or value < timedelta(0) or (not zero and not value):
        raise InvalidInput(f"{what} must be a span of time, not {value!r:.100}", hint="For example: timedelta(minutes=5)")


def check_choice(what: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `InvalidInput` unless it is one of these words."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise InvalidInput(f"{what} must be {', '.join(known[:-1])} or {known[-1]}, not {value!r:.100}")


def check_time(what: str, value: Any) -> datetime:
    """The same time. Raises `InvalidInput` unless it is one, with its time zone."""
    if not isinstance(value, datetime):
        raise InvalidInput(f"{what} must be a datetime, not {value!r:.100}", hint="For example: datetime.now(UTC)")
    if value.utcoffset() is None:
        raise InvalidInput(f"{what} has no time zone: {value.isoformat()}", hint="Use datetime.now(UTC).")
    return value
