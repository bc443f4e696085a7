"""What fills the queue, over HTTP, and the metric of the fullest key."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from penstock.testing import TemporaryDatabases
from tests.http.http_server import Served, serving


@pytest.fixture(scope="module")
def served(databases: TemporaryDatabases) -> Iterator[Served]:
    """A pool in which acme has three jobs and bill one, and a job type without jobs."""
    with databases.database() as url, serving(url) as served, served.client() as client:
        body = {"name": "mail", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
        made = [client.post("/v1/jobs", json=body), client.post("/v1/pools", json={"name": "orders", "slots": 4})]
        for key in ("bill", "acme", "acme", "acme"):
            made.append(client.post("/v1/pools/orders/jobs", json={"key": key, "data": 1}))
        assert [answer.text for answer in made if answer.status_code >= 300] == []
        yield served


def test_the_fullest_keys_and_types_come_first(served: Served) -> None:
    with served.client() as client:
        keys = client.get("/v1/top/keys").json()
        assert [(one["name"], one["key"], one["ready"], one["looked_at"]) for one in keys] == [
            ("orders", "acme", 3, 1.0),
            ("orders", "bill", 1, 1.0),
        ]
        assert [one["key"] for one in client.get("/v1/top/keys", params={"order": "oldest", "limit": 1}).json()] == ["bill"]
        assert [(one["name"], one["key"]) for one in client.get("/v1/top/types").json()] == [("orders", None)]
        assert client.get("/v1/top/types", params={"name": "mail"}).json() == []


@pytest.mark.parametrize("params", [{"order": "sideways"}, {"limit": 0}, {"limit": 1001}])
def test_what_is_no_top_is_refused(served: Served, params: dict[str, str]) -> None:
    with served.client() as client:
        assert client.get("/v1/top/keys", params=params).status_code in (400, 422)


def test_the_metric_has_the_size_of_the_fullest_key_and_no_key(served: Served) -> None:
    with served.client() as client:
        scraped = client.get("/metrics").text
    lines = re.findall(r"^penstock_largest_key_jobs.*", scraped, re.MULTILINE)
    assert lines == ['penstock_largest_key_jobs{type="orders"} 3.0']
    assert "acme" not in scraped
