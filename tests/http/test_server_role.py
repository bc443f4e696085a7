"""A server that logs in to its database with the access `server`, as docs/deploying.md advises."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from penstock import Penstock
from tests.http.http_calls import claim, put, settle
from tests.http.http_server import serving

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture
async def as_server(app: Penstock, sql: Sql, url: str) -> AsyncIterator[str]:
    """The URL of a role with the access `server`."""
    role, parts = f"serving_{uuid4().hex[:8]}", urlsplit(url)
    await app.job_type("echo").declare()
    await sql.execute(f"create role {role} login password 'secret'; select penstock.grant_access('{role}', 'server')")
    yield urlunsplit(parts._replace(netloc=f"{role}:secret@{parts.netloc.rpartition('@')[2]}"))
    await sql.execute(f"drop owned by {role}; drop role {role}")


def test_a_server_starts_and_serves_with_the_access_server(as_server: str) -> None:
    with serving(as_server) as served, served.client() as client:
        put(client, "echo")
        assert settle(client, "echo", claim(client, "echo")[0]) == "succeeded"
        assert client.get("/").status_code == 200
    with serving(as_server, token=None) as served:
        assert "token:" in served.said, "without users and a token it makes one for itself"


def test_what_the_role_of_the_server_may_not_do_is_refused_in_words_and_not_as_an_error_of_the_server(as_server: str) -> None:
    with serving(as_server) as served, served.client() as client:
        for method, path, body in (
            ("POST", "/v1/jobs/echo/pause", None),
            ("PATCH", "/v1/jobs/echo", {"max_attempts": 4}),
            ("POST", "/v1/streams", {"name": "orders", "partitions": 1}),
            ("POST", "/v1/erasures", {"key": "acme"}),
        ):
            answer = client.request(method, path, json=body)
            assert (answer.status_code, answer.json()["id"]) == (403, "forbidden"), path
            assert "access admin" in answer.json()["detail"]
            assert "function" not in answer.text, "the log names it, and the answer does not"
        assert client.post("/types/echo/pause").status_code == 403
        assert "permission denied for function pause" in served.line_with("request_failed")
