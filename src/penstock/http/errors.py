"""Error answers: one JSON object with `title`, `id`, `detail`, `instance`, `type`, `status`, as Rickover's.

Whether `status` is in the body is Rickover's history and kept: its hand-written errors leave it out. Errors that Rickover does
not have carry it.
"""

from __future__ import annotations

from typing import Any

import orjson

from penstock.core.serialization import plain_text
from penstock.errors import RETRY, UNAVAILABLE, PenstockError, http_status
from penstock.http.hints import for_http
from penstock.postgres.translation import StatementCancelled, lacks_rights

JSON = b"application/json; charset=utf-8"
_IDS = {
    400: "invalid_parameter",
    404: "not_found",
    409: "conflict",
    410: "offset_gone",
    413: "entity_too_large",
    429: "queue_full",
    503: "service_unavailable",
}


class ApiError(PenstockError):
    """An answer other than success.

    Args:
        status: The HTTP status.
        id: A machine-readable name of the error.
        title: A sentence for people.
        detail: What to do about it.
        instance: The path that it is about.
        in_body: Whether the body has `status`.
        headers: Further response headers.
    """

    def __init__(
        self,
        status: int,
        id: str,
        title: str,
        *,
        detail: str | None = None,
        instance: str | None = None,
        in_body: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(title, hint=detail)
        self.status = status
        self.id = id
        self.instance = instance
        self.in_body = in_body
        self.headers = headers or {}

    def as_dict(self) -> dict[str, Any]:
        """The error object."""
        fields: dict[str, Any] = {"title": plain_text(self.message), "id": self.id}
        if self.hint:
            fields["detail"] = plain_text(self.hint)
        if self.instance:
            fields["instance"] = plain_text(self.instance)
        if self.in_body:
            fields["status"] = self.status
        return fields

    def body(self) -> bytes:
        """The error object as JSON with a newline."""
        return orjson.dumps(self.as_dict(), option=orjson.OPT_APPEND_NEWLINE)


def bad_json(detail: str | None = None) -> ApiError:
    """The body is not the JSON that the route takes; `detail` says which field is wrong, where that is known."""
    title = "Invalid request: bad JSON. Double check the types of the fields you sent"
    return ApiError(400, "invalid_request", title, detail=detail)


def missing(field: str, instance: str) -> ApiError:
    """A required field is not there."""
    return ApiError(
        400,
        "missing_parameter",
        f"Missing required field: {field}",
        detail=f"Please include a {field} in the request body",
        instance=instance,
    )


def invalid_parameter(title: str, instance: str | None = None, detail: str | None = None) -> ApiError:
    """A value is out of range."""
    return ApiError(400, "invalid_parameter", title, detail=detail, instance=instance)


def not_found(instance: str) -> ApiError:
    """Nothing is there."""
    return ApiError(404, "not_found", "Resource not found", instance=instance, in_body=True)


def method_not_allowed(instance: str, allowed: str) -> ApiError:
    """Something is there, for another method."""
    return ApiError(405, "method_not_allowed", "Method not allowed", instance=instance, in_body=True, headers={"Allow": allowed})


def no_such_type(name: str, detail: str | None = None) -> ApiError:
    """The job type that a request names does not exist."""
    return ApiError(404, "job_type_not_found", f"Job type {name} not found", detail=detail, instance=f"/v1/jobs/{name}")


def other_name(instance: str) -> ApiError:
    """The job belongs to another type than the path says."""
    return ApiError(404, "job_not_found", "Job exists, but with a different name", instance=instance)


def too_large(title: str) -> ApiError:
    """The body, or the data in it, is too large."""
    return ApiError(413, "entity_too_large", title)


def insecure(instance: str) -> ApiError:
    """A proxy says that the request came without TLS."""
    return ApiError(
        403,
        "insecure_request",
        "Server not available over HTTP",
        detail="For your security, please use an encrypted connection",
        instance=instance,
        in_body=True,
    )


def not_one_host(instance: str) -> ApiError:
    """The request does not say for which server it is, or names several, of which a proxy in front may have read another one."""
    return ApiError(400, "invalid_host", "A request of HTTP/1.1 has one Host header", instance=instance, in_body=True)


def server_error() -> ApiError:
    """Something is wrong with the server; the log says what."""
    return ApiError(500, "server_error", "Unexpected server error. Please try again", in_body=True)


def beyond_the_server(instance: str | None) -> ApiError:
    """The access of the server's database role does not include the call; the log names the function."""
    return ApiError(
        403,
        "forbidden",
        "The server may not do this in its database",
        detail="The database role of the server needs the access admin for it. Or do it with a command, as a role that may",
        instance=instance,
        in_body=True,
    )


def from_penstock(error: PenstockError, instance: str | None = None) -> ApiError:
    """The answer for an error of the layers below."""
    if isinstance(error, ApiError):
        return error
    if lacks_rights(error):
        return beyond_the_server(instance)
    status = http_status(error)
    if status == 500:
        return server_error()
    headers = {"Retry-After": "1"} if status in RETRY else None
    if isinstance(error, StatementCancelled):
        # The database answers, and what was too much for it can be said.
        message, hint = error.message[:1].upper() + error.message[1:], for_http(error.hint)
    else:
        # What exactly is wrong with the database is for the log, not for the world.
        message, hint = (UNAVAILABLE, None) if status == 503 else (error.message, for_http(error.hint))
    return ApiError(status, _IDS[status], message, detail=hint, instance=instance, in_body=True, headers=headers)
