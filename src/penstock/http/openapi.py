"""The OpenAPI document: made of the declarations of the routes, those of FastAPI and hot ones alike."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import BaseRoute

from penstock._version import __version__

_TITLE = "Penstock"
_DESCRIPTION = "Background work on PostgreSQL. Basic auth, or a bearer token `NAME.SECRET`."
_OPEN = ("/healthz", "/readyz")
# The models within those of bodies, which FastAPI does not see.
_SCHEMAS: dict[str, Any] = {}


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
# By its name in the document: of a model, FastAPI would make a validator for each error of each route, which takes a server a
# fifth of a second at its start.
_ERROR = {"$ref": "#/components/schemas/Error"}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"content": {"application/json": {"schema": _ERROR, "example": example}}} for status, example in _EXAMPLES.items()
}

LINK: dict[int | str, dict[str, Any]] = {
    200: {"headers": {"Link": {"description": 'The next page: `<...>; rel="next"`.', "schema": {"type": "string"}}}}
}
"""The header of an answer that is one page of several."""


@runtime_checkable
class Declared(Protocol):
    """What a route that is none of FastAPI's says about itself."""

    path: str
    method: str
    takes: Callable[..., Awaitable[None]]
    documented: dict[str, Any]


def json_body(
    model: type[BaseModel], example: Any, *, content: str = "application/json", required: bool = True
) -> dict[str, Any]:
    """The entry of a body that is read from its bytes."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    _SCHEMAS.update(schema.pop("$defs", {}))
    return {"requestBody": {"required": required, "content": {content: {"schema": schema, "example": example}}}}


def json_or_lines(model: type[BaseModel], example: Any, lines: str) -> dict[str, Any]:
    """The entry of a body that is one document, or as NDJSON any number of them."""
    entry = json_body(model, example)
    entry["requestBody"]["content"] |= json_body(model, lines, content="application/x-ndjson")["requestBody"]["content"]
    return entry


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The document of these routes."""
    shown = [_as_api_route(route) if isinstance(route, Declared) else route for route in routes]
    made = get_openapi(title=_TITLE, version=__version__, openapi_version="3.1.0", description=_DESCRIPTION, routes=shown)
    components = made.setdefault("components", {})
    components.setdefault("schemas", {}).update(_SCHEMAS, Error=Error.model_json_schema(mode="serialization"))
    components["securitySchemes"] = {
        "basic": {"type": "http", "scheme": "basic"},
        "bearer": {"type": "http", "scheme": "bearer", "description": "NAME.SECRET"},
    }
    for schema in components["schemas"].values():
        # What a docstring says of each field the fields say themselves.
        if "description" in schema:
            schema["description"] = schema["description"].partition("\n\nAttributes:")[0]
    made["security"] = [{"basic": []}, {"bearer": []}]
    for path, operations in made["paths"].items():
        for operation in operations.values():
            # What does not fit is answered with 400.
            operation["responses"].pop("422", None)
            for response in operation["responses"].values():
                _show_example(response, components["schemas"])
            if path in _OPEN:
                operation["security"] = []
    return made


def _as_api_route(route: Declared) -> APIRoute:
    """The same declaration in the form that FastAPI makes its document of; it answers nothing."""
    hints = typing.get_type_hints(route.takes, include_extras=True)
    _, *parameters = inspect.signature(route.takes).parameters.values()

    async def endpoint() -> None: ...

    endpoint.__name__, endpoint.__doc__ = route.takes.__name__, route.takes.__doc__
    shown = [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    endpoint.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return APIRoute(route.path, endpoint, methods=[route.method], **route.documented)


def _show_example(response: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Give an answer the example of its model."""
    for content in response.get("content", {}).values():
        if "example" in content:
            continue
        schema = content.get("schema", {})
        many = schema.get("type") == "array"
        inner = schema["items"] if many else schema
        reference = inner.get("$ref") or next((one["$ref"] for one in inner.get("anyOf", []) if "$ref" in one), "")
        example = schemas.get(reference.rpartition("/")[2], {}).get("example")
        if example is not None:
            content["example"] = [example] if many else example
