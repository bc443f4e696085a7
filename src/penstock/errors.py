"""The errors that callers see.

There are few types, so that a caller can decide by the type what to do: correct the call (`InvalidInput`), create what is
missing (`NotFound`), accept that it is too late (`Conflict`), or try again later (`DatabaseUnavailable`). Each error says what
was wrong and, in `hint`, what to do. The SQL functions raise the same types with an SQLSTATE of class PS.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose.

    Args:
        message: Description of the error, with the value that is wrong.
        hint: Advice on what to do; shown after the message.

    Attributes:
        foreign: Whether the message comes from a handler or another service, so that it may contain payloads; logs omit it.
    """

    foreign: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[PenstockError], message: str, hint: str | None) -> PenstockError:
    return kind(message, hint=hint)


class InvalidInput(PenstockError):
    """A parameter, name, payload or declaration is not valid (SQLSTATE PS400, PS413). Nothing was written."""


class Unreadable(InvalidInput):
    """A stored value cannot be read: it is not JSON, has numbers that Python cannot represent, or does not match its type."""


class KeyMissing(Unreadable):
    """A stored document is encrypted, and this application does not have its key.

    Args:
        message: Description of the error.
        key_id: Id of the key.
        hint: Advice on what to do.
    """

    def __init__(
        self, message: str, *, key_id: str, hint: str | None = "Give the key: Penstock(keys=[...]), or PENSTOCK_KEYS."
    ) -> None:
        super().__init__(message, hint=hint)
        self.key_id = key_id

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_key_missing, (self.message, self.key_id, self.hint))


def _rebuild_key_missing(message: str, key_id: str, hint: str | None) -> KeyMissing:
    return KeyMissing(message, key_id=key_id, hint=hint)


class NotFound(PenstockError):
    """The named object, such as a job type or a job, does not exist (SQLSTATE PS404)."""


class Conflict(PenstockError):
    """The operation is not possible in the current state of the object (SQLSTATE PS409)."""


class QueueFull(PenstockError):
    """As many jobs wait as may wait: `max_waiting`, `key_max_waiting` (SQLSTATE PS429). Nothing was written; retry later."""


class OffsetGone(PenstockError):
    """Retention has dropped the next events of a reader (SQLSTATE PS410). Continue at the earliest or latest event."""


class Outgrown(PenstockError):
    """Keys were routed for another number of partitions than the stream has now (SQLSTATE PS412). Route them again."""


class DatabaseUnavailable(PenstockError):
    """The database cannot be reached, or did not answer in time. The call may have taken effect; retry it."""


class SchemaMismatch(PenstockError):
    """The schema in the database is missing, or older or newer than this version of Penstock."""


class EmbeddedServerError(PenstockError):
    """The embedded PostgreSQL server could not be started or stopped."""


class MissingExtra(PenstockError, ModuleNotFoundError):
    """A part of Penstock needs packages that are not installed; the message names the extra that installs them.

    Args:
        what: Part of Penstock, as the subject of a sentence.
        extra: Name of the extra.
        package: Package that is missing.
    """

    def __init__(self, what: str, extra: str, package: str) -> None:
        super().__init__(f"{what} needs the package {package}, which is not installed: pip install 'penstock[{extra}]'")
        self.what = what
        self.extra = extra
        self.package = package

    def __reduce__(self) -> tuple[Any, ...]:
        return (MissingExtra, (self.what, self.extra, self.package))


class JobFailed(PenstockError):
    """A job that the caller waited for ended without success."""

    foreign = True


class InvalidDelay(InvalidInput):
    """A handler asked for a delay that is not possible: its attempt fails, and is retried after the backoff of its type.

    A delay is often computed from a clock, so that the next attempt can get another one; no other `InvalidInput` that a handler
    raises is retried.
    """


_LONGEST_DELAY = timedelta(days=366)


class Retry(PenstockError):
    """Raised by a handler: this attempt failed, and the job is retried while attempts are left.

    Args:
        message: Reason, stored with the attempt.
        after: Delay before the next attempt, no time or more and at most 366 days; None: the backoff of the job type.

    Raises:
        InvalidDelay: `after` is something else; in a handler this attempt fails, and is retried after the backoff.
    """

    foreign = True

    def __init__(self, message: str = "the handler asked for a retry", *, after: timedelta | None = None) -> None:
        super().__init__(message)
        if after is not None and (not isinstance(after, timedelta) or not timedelta(0) <= after <= _LONGEST_DELAY):
            raise InvalidDelay(
                f"cannot retry after {after!r:.100}",
                hint='For example: raise Retry("away", after=timedelta(minutes=5)); no less than timedelta(0), at most 366 days.',
            )
        self.after = after

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_retry, (self.message, self.after))


def _rebuild_retry(message: str, after: timedelta | None) -> Retry:
    return Retry(message, after=after)


class Snooze(PenstockError):
    """Raised by the handler of a job: it cannot go on yet, and the job runs again after a while.

    No attempt is used up and no error is kept. The job gives back its place of a concurrency limit. In a pool it holds its key
    meanwhile, unless the pool has `on_retry="skip"`. A job of an `at_most_once` type may start only once: there, it fails.

    Args:
        duration: How long the job waits, more than nothing and at most 366 days.

    Raises:
        InvalidDelay: `duration` is something else; in a handler this attempt fails, and is retried after the backoff.
    """

    foreign = True

    def __init__(self, duration: timedelta) -> None:
        if not isinstance(duration, timedelta) or not timedelta(0) < duration <= _LONGEST_DELAY:
            raise InvalidDelay(
                f"cannot snooze for {duration!r:.100}",
                hint="For example: raise Snooze(timedelta(minutes=5)); more than nothing, at most 366 days.",
            )
        super().__init__(f"the handler put the job off for {duration}")
        self.duration = duration

    def __reduce__(self) -> tuple[Any, ...]:
        return (Snooze, (self.duration,))


class Fail(PenstockError):
    """Raised by a handler: the job has failed permanently and is not retried.

    Args:
        message: Reason, stored with the attempt.
    """

    foreign = True


BY_SQLSTATE: dict[str, type[PenstockError]] = {
    "PS400": InvalidInput,
    "PS404": NotFound,
    "PS409": Conflict,
    "PS410": OffsetGone,
    "PS412": Outgrown,
    "PS413": InvalidInput,
    "PS429": QueueFull,
}
"""The error for each SQLSTATE that the SQL functions raise."""

_SCHEMA_STATES = frozenset({"3F000", "42P01", "42883", "42703"})


def of_sqlstate(sqlstate: str, message: str, hint: str | None) -> PenstockError | None:
    """The error for what a SQL function raised, or for a schema that is missing or of another version; None for other errors."""
    if kind := BY_SQLSTATE.get(sqlstate):
        return kind(message, hint=hint)
    if sqlstate in _SCHEMA_STATES and "penstock" in message:
        return SchemaMismatch(f"the database has no matching Penstock schema: {message}", hint="Run: penstock migrate")
    return None


_STATUSES: list[tuple[type[PenstockError], int]] = [
    (NotFound, 404),
    (QueueFull, 429),
    (OffsetGone, 410),
    (Conflict, 409),
    (InvalidInput, 400),
    (DatabaseUnavailable, 503),
    (SchemaMismatch, 503),
]
UNAVAILABLE = "The database is not available. Please try again"
"""What an HTTP answer says of an error with the status 503."""
RETRY = frozenset({429, 503})
"""The statuses of HTTP answers after which the same request can succeed a second later."""


def http_status(error: PenstockError) -> int:
    """The status of an HTTP answer for an error. 500: the error says nothing about the request."""
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    return 413 if status == 400 and getattr(error.__cause__, "sqlstate", None) == "PS413" else status
