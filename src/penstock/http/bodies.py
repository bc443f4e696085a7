"""Request bodies: parsed fast and strictly. `data` and `result` stay the bytes that were sent, so that no number is rounded."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID, uuid4

import msgspec
from msgspec import Raw, Struct

from penstock.core.checks import ZONED, parse_time
from penstock.core.serialization import storable
from penstock.errors import InvalidInput
from penstock.http.errors import ApiError, bad_json, invalid_parameter, missing, too_large
from penstock.jobs.models import MOST_AFTER, OWN_FIELDS, OWN_OPTIONS

LARGEST_DATA = 102_400
DATA_TOO_LARGE = "Data parameter is too large (100KB max)"
NOTHING = Raw(b"")
_TIMES = ("run_after", "expires_at")
_SPANS = tuple(field for name, field in OWN_FIELDS.items() if OWN_OPTIONS[name] is timedelta)
_UUID = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}")
_WORD = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,255}")
_FIRST = datetime.min.replace(microsecond=1, tzinfo=UTC)
_LAST = datetime.max.replace(microsecond=0, tzinfo=UTC)
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m|h)?")
# Nested too deep is bad JSON as well.
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
S = TypeVar("S", bound=Struct)


class NewJobBody(Struct):
    """A job that is to be enqueued; unknown fields are ignored, as Rickover does."""

    data: Raw = NOTHING
    run_after: datetime | None = None
    expires_at: datetime | None = None
    key: str | None = None
    priority: int | None = None
    unique: str | None = None
    max_attempts: int | None = None
    time_limit_s: float | None = None
    unique_for_s: float | None = None
    after: list[str] | None = None
    when: str | None = None
    group: UUID | None = None

    @property
    def own(self) -> dict[str, Any] | None:
        """The options that the job has in place of those of its type; None: it has none."""
        return {name: value for name, field in OWN_FIELDS.items() if (value := getattr(self, field)) is not None} or None


class BatchLine(NewJobBody):
    """A line of a batch."""

    id: str | None = None


class StatusBody(Struct):
    """A callback."""

    status: str | None = None
    attempt: int | None = None
    retryable: bool | None = True
    result: Raw = NOTHING
    error: Raw = NOTHING


class JobberBody(Struct):
    """What Jobber's clients send."""

    type: str
    payload: Raw = NOTHING


_any = msgspec.json.Decoder(dict[str, Any]).decode
_parts = msgspec.json.Decoder(dict[str, Raw]).decode
_lax: dict[type[Struct], Callable[[bytes], Any]] = {
    kind: msgspec.json.Decoder(kind).decode for kind in (NewJobBody, BatchLine, StatusBody, JobberBody)
}
_exact: dict[type[Struct], Callable[[bytes], Any]] = {
    kind: msgspec.json.Decoder(msgspec.defstruct(f"Exact{kind.__name__}", [], bases=(kind,), forbid_unknown_fields=True)).decode
    for kind in _lax
}


def _decoder(kind: type[S]) -> Callable[[bytes], S]:
    """A parser of a body whose fields are found as Go finds them: in any case.

    Go's JSON, which Rickover and its clients are written in, does not tell `Status` from `status`, and ignores unknown fields. A
    body that has only fields as they are documented, which is nearly every one, is parsed once.
    """
    exact, lax = _exact[kind], _lax[kind]

    def decode(body: bytes) -> S:
        try:
            found: S = exact(body)
        except _BAD:
            found = lax(folded(body))
        return found

    return decode


def folded(body: bytes) -> bytes:
    """A JSON object with its keys in lower case; of several that differ in case only the last one counts, as in Go."""
    parts: dict[str, Raw] = {}
    for key, value in _parts(body).items():
        parts[key.casefold()] = value
    return msgspec.json.encode(parts)


_new_job = _decoder(NewJobBody)
_line = _decoder(BatchLine)
_status = _decoder(StatusBody)
_jobber = _decoder(JobberBody)


def new_job(body: bytes, instance: str) -> tuple[NewJobBody, str]:
    """The body of a PUT, and its data as text, which may still be too large. Raises `ApiError` in Rickover's order."""
    try:
        parsed = _new_job(body)
        data = bytes(parsed.data).decode()
    except _BAD:
        raise bad_json(_wrong_time(body)) from None
    check_fields(parsed)
    if not data:
        raise missing("data", instance)
    return parsed, data


def batch_line(line: bytes) -> tuple[BatchLine, str]:
    """One line of a batch, and its data as text. Raises `ApiError`."""
    try:
        parsed = _line(line)
        data = bytes(parsed.data).decode()
    except _BAD as error:
        raise ApiError(400, "invalid_request", f"The line is not a job: {error}") from None
    check_fields(parsed)
    return parsed, data or "{}"


def pool_job(body: bytes) -> tuple[BatchLine, str, str | None]:
    """The body of an enqueue into a pool, its data as text, and its id. Raises `ApiError`."""
    try:
        parsed = _line(body)
        data = bytes(parsed.data).decode()
    except _BAD:
        raise bad_json(_wrong_time(body)) from None
    check_fields(parsed)
    return parsed, data or "{}", parsed.id


def replacement(body: bytes) -> str | None:
    """The data in the body of a replay, as text; None when there is none. Raises `ApiError`.

    A body that is none of Penstock's is ignored, as Rickover does.
    """
    try:
        data = bytes(_new_job(body).data).decode()
    except _BAD:
        return None
    return check_data(data) if data else None


def check_fields(job: NewJobBody) -> None:
    """Bring times to UTC. Raises `ApiError` for one without a zone, and for what no job can have.

    The database checks too, but refuses all that came at the same time until the bad one is found.
    """
    if job.priority is not None and not -100 <= job.priority <= 100:
        raise invalid_parameter(f"Invalid priority: {job.priority}", detail="A priority is a number from -100 (first) to 100.")
    if job.max_attempts is not None and not 1 <= job.max_attempts <= 32_767:
        raise invalid_parameter(f"Invalid max_attempts: {job.max_attempts}", detail="A job has 1 to 32,767 attempts.")
    for name in _SPANS:
        if (span := getattr(job, name)) is not None and not 0 < span <= 2_592_000:
            raise invalid_parameter(f"Invalid {name}: {span}", detail="More than 0, and at most 30 days.")
    if job.unique_for_s is not None and job.unique is None:
        raise invalid_parameter(
            "Invalid unique_for_s: there is no unique", detail="Give the key that the job holds for this time."
        )
    if job.after is not None or job.when is not None:
        _check_after(job)
    for name, word in (("key", job.key), ("unique", job.unique)):
        if word is not None and not _WORD.fullmatch(word):
            raise invalid_parameter(f"Invalid {name}", detail="Write 1 to 255 characters without control characters.")
    for field in _TIMES:
        if (time := getattr(job, field)) is not None:
            if time.tzinfo is None:
                raise invalid_parameter(f"Invalid {field}: {time.isoformat()} has no time zone", detail=ZONED)
            try:
                # The first and the last moment that Python knows stand for no end to the driver.
                setattr(job, field, min(max(time.astimezone(UTC), _FIRST), _LAST))
            except OverflowError:
                raise bad_json(f"{field} is out of range: {time.isoformat()}. Times lie in the years 1 to 9999.") from None


def _wrong_time(body: bytes) -> str | None:
    """Which field of a job is text that is not a time; None when the body is wrong in another way."""
    try:
        parts = _any(folded(body))
    except _BAD:
        return None
    for field in _TIMES:
        if isinstance(text := parts.get(field), str):
            try:
                parse_time(field, text)
            except InvalidInput as error:
                return f"{error.message}. {error.hint}"
    return None


def _check_after(job: NewJobBody) -> None:
    if job.when not in (None, "succeeded", "finished"):
        raise invalid_parameter(f"Invalid when: {job.when:.100}", detail="It is succeeded or finished.")
    if job.after is None:
        raise invalid_parameter("Invalid when: there is no after", detail="Give the ids of the jobs for which the job waits.")
    if not 1 <= len(job.after) <= MOST_AFTER:
        raise invalid_parameter(
            f"Invalid after: {len(job.after)} jobs", detail=f"A job waits for 1 to {MOST_AFTER} jobs; more in several steps."
        )
    for id in job.after:
        if not _UUID.fullmatch(id.removeprefix("job_")):
            raise invalid_parameter(f"Invalid after: {id:.100}", detail="The id of a job is job_ and a UUID.")


def check_data(data: str) -> str:
    """The same data. Raises `ApiError` when it is too large, or has what PostgreSQL cannot store."""
    if len(data) * 4 > LARGEST_DATA and len(data.encode()) > LARGEST_DATA:
        raise too_large(DATA_TOO_LARGE)
    return storable(data, "the job")


def status(body: bytes, instance: str) -> tuple[StatusBody, int]:
    """The body of a callback and its attempt number. Raises `ApiError` in Rickover's order."""
    try:
        parsed = _status(body)
    except _BAD:
        raise bad_json() from None
    if parsed.attempt is not None and not 0 <= parsed.attempt <= 32_767:
        raise bad_json()
    if not parsed.status:
        raise missing("status", instance)
    if parsed.attempt is None:
        raise missing("attempt", instance)
    if parsed.status not in ("succeeded", "failed"):
        raise ApiError(400, "invalid_status", f"Invalid job status: {parsed.status}", instance=instance)
    return parsed, parsed.attempt


def jobber(body: bytes) -> tuple[str, str]:
    """Type and payload of a Jobber request. Raises `ApiError`."""
    try:
        parsed = _jobber(body)
        payload = bytes(parsed.payload).decode() or "null"
    except _BAD:
        parsed = None
    if parsed is None or not parsed.type.strip():
        raise ApiError(400, "invalid_request", "Request body is not in the right format", in_body=True)
    if len(payload.encode()) > LARGEST_DATA:
        raise too_large("The payload is too large (100KB max)")
    return parsed.type, storable(payload, "the job")


def json_object(body: bytes) -> dict[str, Any]:
    """A body that is an object, with its keys in lower case. Raises `ApiError`."""
    try:
        return _any(folded(body))
    except _BAD:
        raise bad_json() from None


def field_text(body: bytes, name: str) -> str | None:
    """JSON text of a field of a body as it was sent; None when it was not there. Raises `ApiError`."""
    try:
        part = _parts(body or b"{}").get(name)
        return None if part is None else bytes(part).decode()
    except _BAD:
        raise bad_json() from None


def text(raw: Raw, what: str) -> str | None:
    """JSON text of an optional field; None when it was not there or null."""
    try:
        decoded = bytes(raw).decode()
    except UnicodeDecodeError:
        raise bad_json() from None
    return None if decoded in ("", "null") else storable(decoded, what)


def failure(error: str | None) -> str | None:
    """The error of an attempt as an object, from JSON text of any kind."""
    if error is None or error.startswith("{"):
        return error
    return f'{{"type": "Failed", "message": {error}}}'


def job_id(given: str, *, random: bool = False) -> UUID:
    """The id of a path. Raises `ApiError` 400 with Rickover's words.

    Args:
        given: `job_` and a UUID, or the UUID alone, or `random_id`.
        random: Whether `random_id` makes a new one.
    """
    if random and given == "random_id":
        return uuid4()
    if len(given) < 36:
        raise ApiError(400, "invalid_uuid", f'Could not parse "{given}" as a UUID with a prefix')
    prefix, last = given[:-36], given[-36:]
    if not _UUID.fullmatch(last):
        raise ApiError(400, "invalid_uuid", f"incorrect UUID format {last}")
    if prefix not in ("job_", ""):
        raise ApiError(400, "invalid_prefix", f'Please use "job_" for the uuid prefix, not {prefix}', in_body=True)
    return UUID(last)


def span(given: str | None, name: str, longest: timedelta) -> float:
    """Seconds of a span such as 30s, 500ms, 2m or 30, at most `longest`; nothing is 0. Raises `ApiError`."""
    if not given:
        return 0.0
    match = _SPAN.fullmatch(given)
    if match is None:
        raise invalid_parameter(f"Invalid {name}: {given[:100]}", detail="Write a span such as 30s, 500ms or 2m")
    return min(float(match[1]) * _UNITS[match[2]], longest.total_seconds())
