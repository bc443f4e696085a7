"""What a connection may take: slow and large heads, slow bodies, answers without a reader, requests that are answered early."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import httpx
import psutil
import pytest

from penstock.testing import TemporaryDatabases
from tests.http.http_calls import new_id
from tests.http.http_server import TOKEN, Served, serving
from tests.waiting import until

AUTH = f"Authorization: Bearer admin.{TOKEN}\r\n".encode()
QUICK = {
    "PENSTOCK_HTTP_HEAD_TIMEOUT": "2",
    "PENSTOCK_HTTP_BODY_TIMEOUT": "2",
    "PENSTOCK_HTTP_WRITE_TIMEOUT": "2",
    "PENSTOCK_HTTP_KEEP_ALIVE": "60",
    "PENSTOCK_HTTP_MAX_CONNECTIONS": "30",
}


@pytest.fixture(scope="module")
def strict(databases: TemporaryDatabases) -> Iterator[Served]:
    """A server with short time limits."""
    with databases.database() as url, serving(url, **QUICK) as served:
        with served.client() as client:
            body = {"name": "echo", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
            assert client.post("/v1/jobs", json=body).status_code == 201
        yield served


def connect(served: Served) -> socket.socket:
    host, port = served.base_url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def has(served: Served, connection: socket.socket) -> bool:
    """Whether the server has its end of a connection."""
    port = connection.getsockname()[1]
    return any(each.raddr and each.raddr.port == port for each in psutil.Process(served.process.pid).net_connections("tcp"))


def rest(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection. A server that does not end it makes this fail after 30 s."""
    said = b""
    try:
        while part := connection.recv(65536):
            said += part
    except (ConnectionResetError, BrokenPipeError):
        pass
    return said


def drip(connection: socket.socket, piece: bytes) -> bytes:
    """Send a little again and again, until the server says something or ends the connection; then everything it says."""
    connection.settimeout(0.1)
    until = time.monotonic() + 30
    said = b""
    while time.monotonic() < until:
        try:
            connection.sendall(piece)
            part = connection.recv(65536)
            if not part:
                return said
            said += part
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return said
    pytest.fail("the server does not limit the time")


HEAD = b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("first", "piece", "answer"),
    [
        (b"", b"\r\n", b""),
        (b"G", b"E", b"HTTP/1.1 4"),
        (HEAD, b"X-A: b\r\n", b"HTTP/1.1 408"),
        (HEAD + AUTH + b"\r\n", b"\r\n", b"HTTP/1.1 200"),
        (b"PUT /v1/jobs/echo/random_id HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n" + AUTH + b"\r\n", b"x", b"HTTP/1.1 408"),
        (b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n" + AUTH + b"\r\n", b"x", b"HTTP/1.1 408"),
        (b"PUT /v1/jobs/echo/random_id HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n", b"x", b"HTTP/1.1 401"),
    ],
    ids=["only line ends", "a slow line", "slow headers", "line ends after an answer", "a slow body", "another", "not let in"],
)
def test_a_slow_request_is_given_up(strict: Served, first: bytes, piece: bytes, answer: bytes) -> None:
    with closing(connect(strict)) as connection:
        connection.sendall(first)
        said = drip(connection, piece)
        assert said.startswith(answer)
        assert said.count(b"HTTP/1.1") == (1 if answer else 0)


def test_a_connection_that_says_nothing_is_ended(strict: Served) -> None:
    with closing(connect(strict)) as connection:
        assert rest(connection) == b""


def test_a_kept_connection_outlives_the_time_of_a_head(strict: Served) -> None:
    with strict.client() as client:
        stream = client.get("/healthz").extensions["network_stream"]
        before = stream.get_extra_info("client_addr")
        time.sleep(2.5)  # longer than a head may take
        after = client.get("/healthz").extensions["network_stream"].get_extra_info("client_addr")
        assert after == before


@pytest.mark.parametrize("piece", [b"X-A: " + b"b" * 1000 + b"\r\n", b"b" * 1000], ids=["many headers", "one header"])
def test_a_head_without_end_is_refused(strict: Served, piece: bytes) -> None:
    with closing(connect(strict)) as connection:
        connection.sendall(HEAD + b"X-B: ")
        try:
            for _ in range(1_000):
                connection.sendall(piece)
        except (ConnectionResetError, BrokenPipeError):
            pass
        said = rest(connection)
        assert said == b"" or said.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("piece", [b"X-A: b\r\n", b"b" * 1000], ids=["many trailers", "one trailer"])
def test_trailers_without_end_are_refused(strict: Served, piece: bytes) -> None:
    with closing(connect(strict)) as connection:
        request = b"PUT /v1/jobs/echo/random_id HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + AUTH
        connection.sendall(request + b"\r\n1\r\n{\r\n0\r\nX-B: ")
        sent = 0
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while sent < 50_000_000:
                connection.sendall(piece)
                sent += len(piece)
        assert b"HTTP/1.1 2" not in rest(connection)


def test_small_chunks_are_no_reason_to_refuse(strict: Served) -> None:
    body = json.dumps({"data": "x" * 30_000}).encode()
    with strict.client() as client:
        response = client.put(f"/v1/jobs/echo/{new_id()}", content=(body[at : at + 1] for at in range(len(body))))
        assert response.status_code == 202


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_an_early_answer_reaches_who_still_writes(strict: Served, close: bytes, framing: str) -> None:
    """A reset would throw the answer away."""
    size = 20_000_000
    head = b"PUT /v1/jobs/echo/random_id HTTP/1.1\r\nHost: x\r\n" + close + AUTH
    with closing(connect(strict)) as connection:
        if framing == "length":
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
        else:
            connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(size // 1_000_000):
                connection.sendall(b"%x\r\n" % 1_000_000 + b"x" * 1_000_000 + b"\r\n")
            connection.sendall(b"0\r\n\r\n")
        if not close:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        said = rest(connection)
    assert said.startswith(b"HTTP/1.1 413")
    assert (b"HTTP/1.1 200" in said) is (not close)


def test_an_answer_that_is_not_read_is_given_up(strict: Served) -> None:
    with strict.client() as client:
        lines = "".join(json.dumps({"data": "x" * 100_000}) + "\n" for _ in range(100))
        assert client.post("/v1/jobs/echo/batch", content=lines).status_code == 200
        with closing(connect(strict)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            connection.sendall(b"GET /v1/queued-jobs HTTP/1.1\r\nHost: x\r\n" + AUTH + b"\r\n")
            # Nothing is read until the server has given up.
            until(lambda: has(strict, connection), "the connection")
            until(lambda: not has(strict, connection), "the end of the connection")
            assert len(rest(connection)) < 10_000_000
        # A client that reads slowly receives the whole answer.
        with closing(connect(strict)) as connection:
            connection.sendall(b"GET /v1/queued-jobs HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + AUTH + b"\r\n")
            said = b""
            while part := connection.recv(1 << 17):
                said += part
                time.sleep(0.03)
            assert said.endswith(b"]\n")


def test_what_is_not_http_is_answered_in_the_shape_of_errors(strict: Served) -> None:
    with closing(connect(strict)) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["id"] == "invalid_request"


def test_requests_that_are_sent_ahead_are_answered_in_order(strict: Served) -> None:
    with closing(connect(strict)) as connection:
        paths = [b"/healthz", b"/nope", b"/readyz"] * 20
        connection.sendall(b"".join(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n" for path in paths))
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        said = rest(connection)
    statuses = [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 404, 200] * 20 + [200]


def test_more_connections_than_allowed_are_refused(strict: Served) -> None:
    connections = [connect(strict) for _ in range(29)]
    try:
        with closing(connect(strict)) as last, closing(connect(strict)) as over:
            assert rest(over).startswith(b"HTTP/1.1 503")
            assert last is not None
    finally:
        for connection in connections:
            connection.close()
    assert httpx.get(f"{strict.base_url}/healthz").status_code in (200, 503)
