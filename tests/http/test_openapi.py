"""The OpenAPI document against the server: no 5xx, no answer that is not in the document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from penstock.testing import TemporaryDatabases
from tests.http.fuzzing import CHECKS, OPERATIONS
from tests.http.http_server import TOKEN, Served, serving

AUTH = {"Authorization": f"Bearer admin.{TOKEN}"}


@pytest.fixture(scope="module")
def quick(databases: TemporaryDatabases) -> Iterator[Served]:
    """A server that does not wait for long, with something in it."""
    brief = {"PENSTOCK_HTTP_LONGEST_WAIT": "0.2", "PENSTOCK_HTTP_LONGEST_LIVE": "0.2"}
    with databases.database() as url, serving(url, **brief) as served:
        with served.client() as client:
            body = {"name": "invoice-shipments", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
            client.post("/v1/jobs", json=body)
            for n in range(5):
                client.put("/v1/jobs/invoice-shipments/random_id", json={"data": n})
            client.post("/v1/streams", json={"name": "orders", "partitions": 4})
            client.post("/v1/topics", json={"name": "delays"})
            client.put("/v1/streams/orders/groups/billing/members/billing-1", json={})
            for n in range(5):
                client.post("/v1/streams/orders/events", json={"data": n, "key": str(n)})
                client.post("/v1/topics/delays/messages", json={"data": n})
            client.post("/v1/pools", json={"name": "fibonacci", "slots": 4})
            client.put("/v1/pools/fibonacci/standing/acme", json={})
        yield served


@schemathesis.serializer("application/x-ndjson")
def ndjson(_: schemathesis.SerializationContext, value: Any) -> bytes:
    """A batch of up to three lines."""
    return b"\n".join([value if isinstance(value, bytes) else json.dumps(value).encode()] * 3)


@pytest.mark.parametrize("label", list(OPERATIONS))
def test_every_answer_is_in_the_document(quick: Served, label: str) -> None:
    @given(case=OPERATIONS[label].as_strategy())
    @settings(max_examples=20, suppress_health_check=list(HealthCheck), database=None)
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=quick.base_url, headers=AUTH, checks=CHECKS, timeout=30)

    check()


def test_every_operation_has_a_summary_and_examples(quick: Served) -> None:
    document = httpx.get(f"{quick.base_url}/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["description"], where
            assert "422" not in operation["responses"], where
            if body := operation.get("requestBody"):
                assert all("example" in content for content in body["content"].values()), where
            for status, response in operation["responses"].items():
                for kind, content in response.get("content", {}).items():
                    assert "example" in content or not kind.endswith("json"), (where, status)
            for parameter in operation.get("parameters", []):
                assert parameter.get("description"), (where, parameter["name"])
    assert {"basic", "bearer"} == set(document["components"]["securitySchemes"])
