"""What the routes share: roles, answers, reading bodies, and the error answers for the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.convertors import Convertor, register_url_convertor

from penstock.http import shapes
from penstock.http.auth import Principal, Role
from penstock.http.errors import ApiError, bad_json, invalid_parameter, too_large
from penstock.http.paths import plain
from penstock.http.service import Service
from penstock.payload import check_numbers

# Parts of bodies that endpoints read by themselves, for the OpenAPI document.
SCHEMAS: dict[str, Any] = {}
M = TypeVar("M", bound=BaseModel)
F = TypeVar("F", bound=Callable[..., Any])


class _JobId(Convertor[str]):
    regex = r"job_[^\s/]+|random_id|[^\s/]{20,40}"

    def convert(self, value: str) -> str:
        return plain(value)

    def to_string(self, value: str) -> str:
        return value


class _OnlyJobId(_JobId):
    regex = r"job_[^\s/]+"


class _Name(_JobId):
    regex = r"[^\s/]+"


register_url_convertor("job", _JobId())
register_url_convertor("only_job", _OnlyJobId())
register_url_convertor("name", _Name())


class Error(BaseModel):
    """What went wrong."""

    title: str
    id: str
    detail: str | None = None
    instance: str | None = None
    type: str | None = None
    status: int | None = None


_EXAMPLES = {
    400: {"title": "Missing required field: data", "id": "missing_parameter", "instance": "/v1/jobs/invoice-shipments/random_id"},
    401: {
        "title": "Unauthorized. Please include your API credentials",
        "id": "unauthorized",
        "instance": "/v1/jobs",
        "status": 401,
    },
    403: {"title": "Username or password are invalid. Please double check your credentials", "id": "forbidden"},
    404: {"title": "Resource not found", "id": "not_found", "instance": "/v1/jobs/none", "status": 404},
    405: {"title": "Method not allowed", "id": "method_not_allowed", "instance": "/v1/jobs", "status": 405},
    408: {"title": "The request body did not arrive in time", "id": "request_timeout", "status": 408},
    409: {"title": "job type invoice-shipments has concurrency 0", "id": "conflict", "status": 409},
    410: {
        "title": "offset 17 of partition 0 of stream orders is gone",
        "id": "offset_gone",
        "detail": "Retention dropped it; the first that is there is 40, the next to come 93.",
        "status": 410,
    },
    413: {"title": "Data parameter is too large (100KB max)", "id": "entity_too_large"},
    429: {"title": "Too many failed attempts to log in", "id": "too_many_failures", "status": 429},
    503: {"title": "The database is not available. Please try again", "id": "service_unavailable", "status": 503},
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "content": {"application/json": {"example": example}}} for status, example in _EXAMPLES.items()
}

Name = Annotated[str, Path(description="Job type.", examples=["invoice-shipments"], max_length=200)]
Id = Annotated[
    str,
    Path(description="Id of the job: `job_` and a UUID, or the UUID.", examples=["job_282227eb-3c76-4ef7-af7e-25dff933077f"]),
]
Details = Annotated[bool, Query(description="Whether to add the fields that Rickover does not have.")]
Wait = Annotated[str | None, Query(description="How long to wait, such as 30s; at most 5 minutes.", examples=["30s"])]


class GuardedRoute(APIRoute):
    """A route with the role that it needs; closed to all but admins when it does not say."""

    @property
    def role(self) -> Role | None:
        """The role; None: open to everybody."""
        role: Role | None = getattr(self.endpoint, "role", Role.ADMIN)
        return role

    @property
    def batch(self) -> bool:
        """Whether its body may be as large as a batch."""
        return bool(getattr(self.endpoint, "batch", False))


def router(tag: str) -> APIRouter:
    """A router for one resource."""
    return APIRouter(route_class=GuardedRoute, tags=[tag], responses=ERRORS)


def needs(role: Role | None, *, batch: bool = False) -> Callable[[F], F]:
    """Say which role an endpoint needs (None: open to everybody), and whether its body may be as large as a batch."""

    def mark(endpoint: F) -> F:
        endpoint.role = role  # type: ignore[attr-defined]
        endpoint.batch = batch  # type: ignore[attr-defined]
        return endpoint

    return mark


def service_of(request: Request) -> Service:
    """The service of this process."""
    service: Service = request.scope["service"]
    return service


def principal_of(request: Request) -> Principal:
    """Who is there."""
    principal: Principal = request.scope["principal"]
    return principal


@asynccontextmanager
async def listening(request: Request) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client is gone, for a request that waits. The body has to be read before."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.create_task(until_gone(), name="penstock-gone")
    try:
        with service_of(request).metrics.waiting.track_inprogress():
            yield gone
    finally:
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return raw_answer(shapes.dumps(value), status, headers)


def raw_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of JSON bytes."""
    return Response(body, status, {"content-type": "application/json; charset=utf-8", **(headers or {})})


def error_answer(error: ApiError) -> Response:
    """The answer for an error."""
    return raw_answer(error.body(), error.status, error.headers)


async def read(request: Request, model: type[M]) -> M:
    """The body as a model. Raises `ApiError` 400."""
    return fit(await request.body(), model, request.url.path)


def fit(body: bytes, model: type[M], path: str) -> M:
    """A body as a model. Raises `ApiError` 400."""
    # What the model does not look into would take 1e-400 for 0, and 1e400 for no number.
    check_numbers(body.decode("utf-8", "replace"), "the request")
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise unfit(error, path) from None


async def limited_body(request: Request) -> bytes:
    """The body where the route also takes batches, which may be larger. Raises `ApiError` 413."""
    most = service_of(request).settings.max_body
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_large(f"The request body is too large ({most} bytes max)")
    return body


def unfit(error: ValidationError, path: str) -> ApiError:
    """The answer to a body that does not fit its model."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return bad_json()
    place = ".".join(str(part) for part in first["loc"])
    return invalid_parameter(f"Invalid {place or 'body'}: {first['msg']}", path)


def body_of(model: type[BaseModel], example: Any, *, content: str = "application/json", required: bool = True) -> dict[str, Any]:
    """The OpenAPI entry of a body that the endpoint reads by itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    SCHEMAS.update(schema.pop("$defs", {}))
    return {"requestBody": {"required": required, "content": {content: {"schema": schema, "example": example}}}}
