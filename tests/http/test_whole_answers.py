"""Answers to a PUT and to a callback are written at once; the client sees no difference."""

from __future__ import annotations

import base64
import json
import socket
from uuid import uuid4

import httpx

from tests.http.http_server import TOKEN, Served

BODY = b'{"data": 1}'
LOGIN = base64.b64encode(f"admin:{TOKEN}".encode()).decode()


def request(served: Served, name: str, version: str = "1.1", more: str = "", body: bytes = BODY) -> bytes:
    head = f"PUT /v1/jobs/{name}/random_id HTTP/{version}\r\nHost: x\r\nAuthorization: Basic {LOGIN}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{more}\r\n".encode() + body


def exchange(served: Served, sent: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    port = int(served.base_url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as there:
        there.sendall(sent)
        found = b""
        while piece := there.recv(65_536):
            found += piece
        return found


def test_the_headers_are_those_of_other_answers(client: httpx.Client, echo: str) -> None:
    put = client.put(f"/v1/jobs/{echo}/random_id", json={"data": 1})
    got = client.get(f"/v1/jobs/{put.json()['id']}")
    # An answer that was refused is written header by header.
    refused = client.put(f"/v1/jobs/{echo}/random_id", json={"data": 1, "priority": 1000})
    assert (put.status_code, refused.status_code) == (202, 400)
    assert set(put.headers) - {"penstock-outcome"} == set(refused.headers)
    assert set(got.headers) <= set(put.headers)
    same = set(refused.headers) - {"date", "content-length", "x-request-id"}
    assert {name: put.headers[name] for name in same} == {name: refused.headers[name] for name in same}
    assert len(put.headers.get_list("server")) == len(put.headers.get_list("date")) == 1


def test_requests_that_were_sent_ahead_are_answered_in_order(served: Served, echo: str) -> None:
    ids = [str(uuid4()) for _ in range(4)]
    sent = b"".join(
        request(served, echo, more=f"X-Request-Id: r{n}\r\n" + ("Connection: close\r\n" if n == 3 else ""))
        for n in range(len(ids))
    )
    answers = exchange(served, sent).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"202"] * 4
    assert [f"x-request-id: r{n}".encode() in answer for n, answer in enumerate(answers)] == [True] * 4
    assert [b"connection: close" in answer for answer in answers] == [False, False, False, True]
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["status"] == "queued"


def test_older_clients_and_those_that_ask_first_are_answered(served: Served, echo: str) -> None:
    assert exchange(served, request(served, echo, "1.0")).split()[1] == b"202"
    asked = exchange(served, request(served, echo, more="Expect: 100-continue\r\nConnection: close\r\n"))
    assert asked.count(b" 202 ") == 1


def test_an_answer_that_no_caller_waits_for_harms_no_other(client: httpx.Client, served: Served, echo: str) -> None:
    port = int(served.base_url.rpartition(":")[2])
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as there:
            there.sendall(request(served, echo))
    assert client.put(f"/v1/jobs/{echo}/random_id", json={"data": 1}).status_code == 202
