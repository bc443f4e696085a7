"""The errors that callers see.

Few kinds, so that a caller can decide by kind what to do: mend the call (`InvalidInput`), create what is missing
(`NotFound`), accept that it is too late (`Conflict`), or try again later (`DatabaseUnavailable`). Each says what was wrong
and, in `hint`, what to do. The SQL functions raise the same kinds with an SQLSTATE of class PS.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose.

    Args:
        message: What went wrong, with the value that was wrong.
        hint: What to do about it; shown after the message.

    Attributes:
        foreign: Whether the message is a handler's or another service's, so that it may hold payloads; logs leave it out.
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
    """What is stored cannot be read: it is no JSON, has numbers that Python has not, or does not fit its type."""


class NotFound(PenstockError):
    """There is no such job type or job (SQLSTATE PS404)."""


class Conflict(PenstockError):
    """The operation is not possible in the state that the thing is in (SQLSTATE PS409)."""


class OffsetGone(PenstockError):
    """What a reader wanted next has been dropped by retention (SQLSTATE PS410). Go on from the earliest or latest event."""


class Outgrown(PenstockError):
    """Keys were routed for another number of partitions than the stream has by now (SQLSTATE PS412). Route them again."""


class DatabaseUnavailable(PenstockError):
    """The database cannot be reached, or did not answer in time. The call may or may not have taken effect; retry it."""


class SchemaMismatch(PenstockError):
    """The schema in the database is missing, or older or newer than this version of Penstock."""


class EmbeddedServerError(PenstockError):
    """The embedded PostgreSQL server could not be started or stopped."""


class JobFailed(PenstockError):
    """A job that the caller waited for ended without success."""

    foreign = True


class Retry(PenstockError):
    """Raised by a handler: this attempt failed, try again (while attempts are left).

    Args:
        message: The reason, kept with the attempt.
        after: Delay before the next attempt; None means the backoff of the job type.
    """

    foreign = True

    def __init__(self, message: str = "the handler asked for a retry", *, after: timedelta | None = None) -> None:
        super().__init__(message)
        self.after = after

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_retry, (self.message, self.after))


def _rebuild_retry(message: str, after: timedelta | None) -> Retry:
    return Retry(message, after=after)


class Fail(PenstockError):
    """Raised by a handler: this job has failed for good, do not retry it.

    Args:
        message: The reason, kept with the attempt.
    """

    foreign = True
