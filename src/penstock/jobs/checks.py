"""Checks of names and options of job types: an error names the value that is wrong, and what would be right."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from penstock.core.checks import check_documentation, check_name, check_number, did_you_mean
from penstock.errors import InvalidInput, NotFound
from penstock.jobs.models import Backoff, Options, RateLimit


def check_type_name(name: Any) -> None:
    """Raise `InvalidInput` unless this can be the name of a job type."""
    check_name("job type name", name, 200, never="job_")


def no_such_type(name: str, known: Iterable[str]) -> NotFound:
    """The error for a job type that does not exist, with the nearest of those that do."""
    return NotFound(f"no such job type: {name}", hint=did_you_mean(name, known) or "List those that exist: penstock types")


def check_options(name: str, options: Options) -> None:
    """Raise `InvalidInput` unless the values of these options of a job type are valid."""
    if not isinstance(options.backoff, Backoff):
        raise InvalidInput(
            f"backoff of {name} must be a Backoff, not {options.backoff!r}",
            hint="For example: Backoff(base=timedelta(seconds=2))",
        )
    for option, value in _spans(options).items():
        if value is not None and not isinstance(value, timedelta):
            raise InvalidInput(
                f"{option} of {name} must be a timedelta, not {value!r}", hint=f"For example: {option}=timedelta(seconds=30)"
            )
    for option in ("max_attempts", "concurrency"):
        if (value := getattr(options, option)) is not None:
            check_number(f"{option} of {name}", value, 0 if option == "concurrency" else 1, 2**31 - 1)
    check_documentation(name, options.docs_url, options.owner)
    check_rate(f"rate_limit of {name}", options.rate_limit)
    for option in ("keep_result", "encrypted"):
        if not isinstance(value := getattr(options, option), bool):
            raise InvalidInput(f"{option} of {name} must be True or False, not {value!r}")


def _spans(options: Options) -> dict[str, Any]:
    return {
        "visibility_timeout": options.visibility_timeout,
        "time_limit": options.time_limit,
        "backoff.base": options.backoff.base,
        "backoff.cap": options.backoff.cap,
    }


def check_rate(what: str, value: Any) -> None:
    """Raise `InvalidInput` unless the value is a `RateLimit` or None."""
    hint = "For example: RateLimit(10, timedelta(seconds=1))"
    if value is None:
        return
    if not isinstance(value, RateLimit):
        raise InvalidInput(f"{what} must be a RateLimit, not {value!r}", hint=hint)
    if not isinstance(value.period, timedelta):
        raise InvalidInput(f"the period of {what} must be a timedelta, not {value.period!r}", hint=hint)
    check_number(f"the limit of {what}", value.limit, 1, 2**31 - 1)
