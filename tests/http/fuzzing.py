"""What the fuzzers share: JSON, torn bodies, and the operations of the OpenAPI document."""

from __future__ import annotations

import json
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from penstock.http.server import http_routes

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.datetimes().map(lambda time: time.isoformat() + "Z"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


FIELDS = [
    "data", "run_after", "expires_at", "key", "priority", "unique", "id", "status", "attempt", "retryable", "result", "error",
    "type", "payload", "name", "delivery_strategy", "attempts", "concurrency",
]  # fmt: skip


VALUES = st.sampled_from(["succeeded", "failed", "at_least_once", 3, True, "2036-01-01T00:00:00Z", f"job_{'0' * 36}"]) | JSON


OBJECTS = st.dictionaries(st.sampled_from(FIELDS), VALUES)


BODIES = st.binary() | OBJECTS.map(lambda value: json.dumps(value).encode()) | JSON.map(lambda value: json.dumps(value).encode())


@st.composite
def torn(draw: st.DrawFn) -> bytes:
    """A body with a few bytes changed, lost or added."""
    body = bytearray(draw(BODIES))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(body)))
        body[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(body)


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


OPERATIONS = {
    operation.label: operation
    for operation in (
        result.ok() for result in schemathesis.openapi.from_dict(http_routes(lifespan=None).openapi()).get_all_operations()
    )
}
