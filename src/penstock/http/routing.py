"""How routes are declared: roles, dependencies, bodies, answers.

Most routes are endpoints of FastAPI, with the class `GuardedRoute`: before anything of the body is read, the call is let in with
the role that a dependency of the route names (`READ`, `Annotated[Principal, needs(Role.WORK)]`), and closed to all but admins
when none does. What the endpoint returns is an instance of the model of its annotation, which the OpenAPI document shows, and is
written by `to_json`. Bodies are models too (`body`), but read from their bytes, since the strictness of JSON (a time is a
string, true is no number) and the digits of numbers are gone once a body is parsed; and whatever the content type, as curl and
Rickover's clients are.

The few routes that servers spend their time in are hot routes: plain routes of Starlette, declared with all that the OpenAPI
document shows, which the middleware calls without the machinery of FastAPI.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.core.checks import ZONED
from penstock.core.records import to_json
from penstock.core.serialization import check_numbers
from penstock.core.tracing import valid_traceparent
from penstock.errors import PenstockError
from penstock.http.audit import begin_change, end_change
from penstock.http.auth import Principal, Role
from penstock.http.call import Call
from penstock.http.errors import ApiError, bad_json, invalid_parameter, too_large
from penstock.http.openapi import ERRORS, json_body
from penstock.http.origin import SAFE_METHODS
from penstock.http.paths import plain
from penstock.http.service import Service
from penstock.postgres.database import Database

M = TypeVar("M", bound=BaseModel)
P = TypeVar("P")
E = TypeVar("E", bound=Callable[..., Awaitable[None]])


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


class _Key(_JobId):
    """A key may have anything in it; a slash is written `%2F`."""

    regex = r"[^/]+"


register_url_convertor("job", _JobId())
register_url_convertor("only_job", _OnlyJobId())
register_url_convertor("name", _Name())
register_url_convertor("key", _Key())


# -- dependencies


async def service_of(connection: HTTPConnection) -> Service:
    """The service of this process."""
    service: Service = connection.scope["service"]
    return service


async def _database(connection: HTTPConnection) -> Database:
    service: Service = connection.scope["service"]
    return service.database


async def _principal(connection: HTTPConnection) -> Principal:
    principal: Principal = connection.scope["principal"]
    return principal


async def _path(connection: HTTPConnection) -> str:
    path: str = connection.scope["path"]
    return path


async def _traceparent(connection: HTTPConnection) -> str | None:
    given = connection.headers.getlist("traceparent")
    return valid_traceparent(given[0]) if len(given) == 1 else None


async def _raw_body(request: Request) -> bytes:
    return await request.body()


async def _room(connection: HTTPConnection) -> None:
    service: Service = connection.scope["service"]
    service.check_room()


def part(kind: type[P], /) -> Any:
    """What gives an endpoint the part of the service of that class, as the annotation of a parameter."""

    async def of(connection: HTTPConnection) -> P:
        service: Service = connection.scope["service"]
        return service.part(kind)

    return Depends(of)


def needs(role: Role | None, *, batch: bool = False) -> Any:
    """The dependency that says which role a route needs, and gives the user who has it.

    Args:
        role: The role; None: open to all clients, and there may be no user.
        batch: Whether the body may be as large as a batch.
    """

    async def of(connection: HTTPConnection) -> Principal | None:
        return connection.scope.get("principal")

    of.guard = (role, batch)  # type: ignore[attr-defined]
    return Depends(of)


OPEN, READ, ENQUEUE, WORK, ADMIN = (needs(role) for role in (None, Role.READ, Role.ENQUEUE, Role.WORK, Role.ADMIN))
BATCH = needs(Role.ENQUEUE, batch=True)

CurrentService = Annotated[Service, Depends(service_of)]
OpenDatabase = Annotated[Database, Depends(_database)]


def _audited() -> None:
    """The marker of a route whose calls are in the audit although it is not for admins."""


AUDITED = Depends(_audited)
# The user, whatever role the route needs.
User = Annotated[Principal, Depends(_principal)]
# The path of the request, which errors name as their instance.
Instance = Annotated[str, Depends(_path)]
# The trace context of the client, as W3C Trace Context has it; None: it has none.
Traceparent = Annotated[str | None, Depends(_traceparent)]
# Room for one more live connection.
Room = Annotated[None, Depends(_room)]
# The body as it was sent, for payloads whose digits have to stay.
RawBody = Annotated[bytes, Depends(_raw_body)]

Name = Annotated[str, Path(description="Job type.", examples=["invoice-shipments"], max_length=200)]
Id = Annotated[
    str,
    Path(description="Id of the job: `job_` and a UUID, or the UUID.", examples=["job_282227eb-3c76-4ef7-af7e-25dff933077f"]),
]
Details = Annotated[bool, Query(description="Whether to add the fields that Rickover does not have.")]
Wait = Annotated[str | None, Query(description="How long to wait, such as 30s; at most 5 minutes.", examples=["30s"])]


async def _open_type(name: Name, user: User, path: Instance) -> str:
    user.require(name, path)
    return name


# The job type of the path, which is open to the user.
OpenType = Annotated[str, Depends(_open_type)]


def body(model: type[M], /, example: Any, *, required: bool = True) -> Any:
    """What gives an endpoint its body as a model, in the annotation of a parameter; an empty body is `{}`.

    Raises `ApiError` 400 for a body that does not fit.
    """

    async def of(request: Request) -> M:
        return fit(await request.body(), model, request.scope["path"])

    of.openapi = json_body(model, example, required=required)  # type: ignore[attr-defined]
    return Depends(of)


# -- routes


class GuardedRoute(APIRoute):
    """An endpoint of FastAPI behind a role.

    Attributes:
        role: The role; None: open to all clients.
        batch: Whether its body may be as large as a batch.
        action: What the audit calls it; None: its calls are not in the audit. All changes for admins are.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.role, self.batch = guard_of(self.dependant)
        changes = self.role is Role.ADMIN and not (self.methods or set()) & SAFE_METHODS and not path.endswith("/preview")
        marked = any(call is _audited for call in _calls(self.dependant))
        self.action = endpoint.__name__.replace("_", " ") if changes or marked else None
        for call in _calls(self.dependant):
            if extra := getattr(call, "openapi", None):
                self.openapi_extra = {**extra, **(self.openapi_extra or {})}

    def get_route_handler(self) -> Callable[[Request], Any]:
        """See `APIRoute`: the same, with answers that are written by `to_json`."""
        endpoint, status = self.endpoint, self.status_code or 200

        async def answered(**values: Any) -> Response:
            found = await endpoint(**values)
            if isinstance(found, Response):
                return found
            # What the endpoint says about its answer beside the value: headers, another status.
            said = next((value for value in values.values() if type(value) is Response), None)
            code = status if said is None or said.status_code is None else said.status_code
            given = Response(status_code=code) if found is None else raw_answer(to_json(found), code)
            if said is not None:
                given.raw_headers.extend(said.raw_headers)
            return given

        self.dependant.call = answered
        return super().get_route_handler()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the call in, and answer it."""
        if scope["method"] not in (self.methods or ()):
            raise HTTPException(405)
        call: Call = scope["call"]
        scope["principal"] = await call.authorize(self.path_format, self.role)
        call.limit_body(batch=self.batch)
        if self.action is None:
            await super().handle(scope, receive, send)
            return
        # The user was let in with the role. What the body says is not noted: it may hold anything.
        told = {**scope["path_params"], **QueryParams(scope.get("query_string", b""))}
        database = call.service.database
        id = await begin_change(database, call.user.name, self.action, told)
        try:
            await super().handle(scope, receive, send)
        except PenstockError as error:
            await end_change(database, id, None, type(error).__name__ if error.foreign else error.message)
            raise
        await end_change(database, id, *((1, None) if call.status < 400 else (None, f"answered with {call.status}")))


class HotRoute(Route):
    """A route that the middleware answers by itself.

    Args:
        method: The method.
        path: The path with its parameters.
        endpoint: Given the call, and the parameters in their order; answers the call.
        role: The role that it needs.
        documented: What the OpenAPI document says beside the parameters, as arguments of `APIRoute`.
    """

    def __init__(
        self, method: str, path: str, endpoint: Callable[..., Awaitable[None]], role: Role, documented: dict[str, Any]
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.methods = {method}
        self.method = method
        self.role = role
        self.documented = documented
        self.takes = endpoint
        self._match = self.path_regex.fullmatch

    def parameters_of(self, path: str) -> Iterable[str] | None:
        """The parameters in a path; None: it is another route's."""
        match = self._match(path)
        if match is None:
            return None
        return map(plain, match.groups()) if "%" in path else match.groups()

    async def answer(self, call: Call, parameters: Iterable[str]) -> None:
        """Let a call in, and answer it."""
        await call.authorize(self.path_format, self.role)
        await self.takes(call, *parameters)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Route`: only for other methods, since the middleware asks hot routes first."""
        raise HTTPException(405)


def router(tag: str) -> APIRouter:
    """A router for one resource."""
    return APIRouter(route_class=GuardedRoute, tags=[tag], responses=ERRORS)


def hot(
    api: APIRouter, method: str, path: str, role: Role, *, takes: dict[str, Any], status: int = 200, answers: Any = None,
    said: str = "Successful Response",
) -> Callable[[E], E]:  # fmt: skip
    """Declare a hot route.

    Args:
        api: The router of the resource.
        method: The method.
        path: The path with its parameters.
        role: The role that it needs.
        takes: Its body; see `json_body`.
        status: Of an answer that is no error.
        answers: The model of that answer; None: it has no body.
        said: What the document says of that answer.
    """
    documented = {
        "tags": api.tags, "responses": api.responses, "openapi_extra": takes, "status_code": status, "response_model": answers,
        "response_description": said,
    }  # fmt: skip
    if answers is None:
        documented["response_class"] = Response

    def declare(endpoint: E) -> E:
        api.routes.append(HotRoute(method, path, endpoint, role, documented))
        return endpoint

    return declare


def guard_of(dependant: Dependant) -> tuple[Role | None, bool]:
    """The role that a route needs, and whether its body may be as large as a batch. Closed to all but admins by default."""
    return next((call.guard for call in _calls(dependant) if hasattr(call, "guard")), (Role.ADMIN, False))


def _calls(dependant: Dependant) -> Iterator[Any]:
    for dependency in dependant.dependencies:
        yield dependency.call
        yield from _calls(dependency)


# -- bodies and answers


@asynccontextmanager
async def listening(call: Call) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client is gone, or may no longer wait, for a request that waits. The body has to be read before.

    Raises `ApiError` 403 at the end when the user may no longer get the answer.
    """

    async def until_gone() -> None:
        while (await call.receive_limited())["type"] != "http.disconnect":
            pass

    async def until_over() -> None:
        tasks = [asyncio.ensure_future(one) for one in (until_gone(), watch.ended.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with call.watching() as watch:
        gone = asyncio.create_task(until_over(), name="penstock-gone")
        try:
            with call.service.metrics.waiting.track_inprogress():
                yield gone
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone
        watch.check()


def raw_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of JSON bytes."""
    return Response(body, status, {"content-type": "application/json; charset=utf-8", **(headers or {})})


def error_answer(error: ApiError) -> Response:
    """The answer for an error."""
    return raw_answer(error.body(), error.status, error.headers)


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
    service: Service = request.scope["service"]
    most = service.settings.max_body
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_large(f"The request body is too large ({most} bytes max)")
    return body


def unfit(error: ValidationError, path: str) -> ApiError:
    """The answer to a body that does not fit its model."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    if first["type"] == "json_invalid":
        return bad_json()
    # A field that takes seconds as well has an error for each of the two.
    if (unzoned := next((one for one in found if one["type"] == "timezone_aware"), None)) is not None:
        field = ".".join(str(part) for part in unzoned["loc"] if "datetime" not in str(part))
        return invalid_parameter(f"Invalid {field}: it has no time zone", path, ZONED)
    place = ".".join(str(part) for part in first["loc"])
    return invalid_parameter(f"Invalid {place or 'body'}: {first['msg']}", path)
