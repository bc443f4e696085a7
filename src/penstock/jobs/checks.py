"""Checks of names and options of job types: an error names the value that is wrong, and what would be right."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from penstock.core.checks import check_documentation, check_flag, check_name, check_number, check_real, check_span, did_you_mean
from penstock.errors import InvalidInput, NotFound
from penstock.jobs.options import Backoff, Options, RateLimit
from penstock.settings import Keep

LONGEST_TIMEOUT = timedelta(days=30)
_SHORTEST_TIMEOUT = timedelta(seconds=1)
_LONGEST_BACKOFF = timedelta(days=366)
LONGEST_KEPT = timedelta(days=365)
"""Finished jobs that are to be kept for longer belong into a lake."""


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
    backoff = options.backoff
    check_span(f"visibility_timeout of {name}", options.visibility_timeout, shortest=_SHORTEST_TIMEOUT, longest=LONGEST_TIMEOUT)
    if options.time_limit is not None:
        check_span(f"time_limit of {name}", options.time_limit, longest=LONGEST_TIMEOUT)
    check_span(f"backoff.cap of {name}", backoff.cap, zero=True, longest=_LONGEST_BACKOFF)
    check_span(f"backoff.base of {name}", backoff.base, zero=True, longest=backoff.cap)
    check_real(f"backoff.factor of {name}", backoff.factor, 1, 100)
    check_real(f"backoff.jitter of {name}", backoff.jitter, 0, 1)
    for option in ("max_attempts", "concurrency", "max_waiting", "max_crashes"):
        if (value := getattr(options, option)) is not None:
            check_number(f"{option} of {name}", value, 0 if option == "concurrency" else 1, 2**31 - 1)
    if options.keep is not None:
        check_keep(f"keep of {name}", options.keep)
    check_documentation(name, options.docs_url, options.owner)
    check_rate(f"rate_limit of {name}", options.rate_limit)
    for option in ("keep_result", "encrypted"):
        check_flag(f"{option} of {name}", getattr(options, option))


def check_keep(what: str, value: Any) -> None:
    """Raise `InvalidInput` unless the value says how long finished jobs of a type are kept."""
    if isinstance(value, Keep):
        for outcome in ("succeeded", "failed"):
            if (span := getattr(value, outcome)) is not None:
                check_span(f"{outcome} of {what}", span, longest=LONGEST_KEPT)
    elif isinstance(value, timedelta):
        check_span(what, value, longest=LONGEST_KEPT)
    else:
        raise InvalidInput(
            f"{what} must be a timedelta or a Keep, not {value!r:.100}",
            hint="For example: Keep(succeeded=timedelta(days=3), failed=timedelta(days=365))",
        )


def check_rate(what: str, value: Any) -> None:
    """Raise `InvalidInput` unless the value is a `RateLimit` or None."""
    hint = "For example: RateLimit(10, timedelta(seconds=1))"
    if value is None:
        return
    if not isinstance(value, RateLimit):
        raise InvalidInput(f"{what} must be a RateLimit, not {value!r}", hint=hint)
    check_span(f"the period of {what}", value.period, shortest=timedelta(milliseconds=10), longest=timedelta(days=31))
    check_number(f"the limit of {what}", value.limit, 1, 2**31 - 1)
