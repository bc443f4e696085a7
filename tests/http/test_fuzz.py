"""The parsers against anything: what they take, they take apart; what they do not take is a 400 or 413, never a crash."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.http import auth, bodies
from penstock.http.errors import ApiError, from_penstock
from penstock.http.jobs import lists, types
from tests.http.fuzzing import JSON, torn
from tests.http.http_server import TOKEN, Served

PARSERS: dict[str, Callable[[bytes], Any]] = {
    "new job": lambda body: bodies.check_data(bodies.new_job(body, "/")[1]),
    "batch line": lambda body: bodies.check_data(bodies.batch_line(body)[1]),
    "pool job": lambda body: bodies.check_data(bodies.pool_job(body)[1]),
    "status": lambda body: bodies.text(bodies.status(body, "/")[0].result, "the result"),
    "jobber": bodies.jobber,
    "job type": lambda body: types.new_type(bodies.json_object(body), "/"),
    "job id": lambda body: bodies.job_id(body.decode("utf-8", "replace"), random=True),
    "span": lambda body: bodies.span(body.decode("utf-8", "replace"), "wait", timedelta(minutes=5)),
    "authorization": lambda body: auth.parse_authorization(body, "", "/"),
    "basic": lambda body: auth.parse_authorization(b"Basic " + body, "", "/"),
    "cursor": lambda body: lists.parse_cursor(body.decode("utf-8", "replace")),
    "time": lambda body: lists.parse_time(body.decode("utf-8", "replace"), "since"),
}


@pytest.mark.parametrize("parser", list(PARSERS))
@given(body=torn())
@example(body=b"")
@example(body=b"\x00")
@example(body=b'{"data": 1e999}')
@example(body=b"[" * 10_000)
@example(body=b'{"data": ' + b"[" * 5_000 + b"]" * 5_000 + b"}")
@example(body=b'{"data": 1, "run_after": "9999-12-31T23:59:59-23:59"}')
@example(body=b'{"name": "x", "delivery_strategy": "at_least_once", "attempts": 1, "concurrency": 1, "backoff_base_s": 1e308}')
@settings(max_examples=300)
def test_a_parser_takes_it_or_refuses_it(parser: str, body: bytes) -> None:
    try:
        PARSERS[parser](body)
    except PenstockError as error:
        answer = from_penstock(error)
        assert isinstance(answer, ApiError)
        assert answer.status in (400, 401, 413)
        answer.body().decode()


@given(data=JSON)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_accepted_comes_back(client: httpx.Client, data: Any) -> None:
    assert client.get("/v1/jobs/fuzzed").status_code in (200, 404)
    if client.get("/v1/jobs/fuzzed").status_code == 404:
        body = {"name": "fuzzed", "delivery_strategy": "at_least_once", "attempts": 1, "concurrency": 1}
        client.post("/v1/jobs", json=body)
    response = client.put("/v1/jobs/fuzzed/random_id", content=json.dumps({"data": data}))
    assert response.status_code in (202, 400)
    if response.status_code == 202:
        stored = json.loads(client.get(f"/v1/jobs/{response.json()['id']}").text, parse_int=float)["data"]
        # PostgreSQL writes 1e3 as 1000.
        assert stored == json.loads(json.dumps(data), parse_int=float)


HEAD = b"Host: x\r\nAuthorization: Bearer admin." + TOKEN.encode() + b"\r\n"
PATHS = st.sampled_from(
    [
        "/v1/jobs",
        "/v1/jobs/x",
        "/v1/jobs/x/random_id",
        "/v1/jobs/x/batch",
        "/v1/queued-jobs?cursor=",
        "/jobber/queue",
        "/v1/pools",
        "/v1/pools/x/jobs",
    ]
)


@given(
    method=st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW"]),
    path=PATHS,
    rest=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=10),
    body=torn(),
    header=st.binary(max_size=20),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_request_breaks_the_server(served: Served, method: str, path: str, rest: str, body: bytes, header: bytes) -> None:
    host, port = served.base_url.removeprefix("http://").split(":")
    request = (
        f"{method} {path}{rest} HTTP/1.1\r\n".encode() + HEAD + b"X-Request-Id: " + header.replace(b"\r", b"").replace(b"\n", b"")
    )
    request += b"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request + body)
        answer = b""
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass
    if answer:
        assert answer.startswith(b"HTTP/1.1 ")
        assert int(answer[9:12]) < 500, answer
