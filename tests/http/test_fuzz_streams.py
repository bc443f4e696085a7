"""Streams of JSON and of bytes, topics and consumer groups against anything, from each role: no 5xx, and no user does or sees
more than the role and the names that were granted."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.http.auth import Role
from penstock.testing import TemporaryDatabases
from tests.command_line import penstock
from tests.http.fuzzing import CHECKS, JSON, OPERATIONS, torn
from tests.http.http_server import Served, serving

PASSWORD = "a-long-secret-word"
MARKER = "payload-that-is-not-yours"
S, G, T = "/v1/streams/{name}", "/v1/streams/{name}/groups", "/v1/topics/{name}"
M, P = G + "/g/members/m", T + "/subscribers/me"

# By the tables of docs/http.md.
CALLS: dict[Role, list[tuple[str, str]]] = {
    Role.READ: [
        ("GET", "/v1/streams"), ("GET", S), ("GET", f"{S}/events"), ("GET", f"{S}/events/follow"), ("GET", G), ("GET", f"{G}/g"),
        ("GET", "/v1/topics"), ("GET", T), ("GET", f"{T}/subscribers"), ("GET", f"{T}/messages"),
    ],
    Role.ENQUEUE: [("POST", f"{S}/events"), ("POST", f"{T}/messages")],
    Role.WORK: [
        ("PUT", M), ("POST", f"{M}/read"), ("POST", f"{M}/commit"),
        ("POST", f"{M}/failures"), ("POST", f"{M}/heartbeat"), ("DELETE", M),
        ("PUT", P), ("POST", f"{P}/renew"), ("DELETE", P), ("GET", f"{T}/deliveries"),
    ],
    Role.ADMIN: [
        ("POST", "/v1/streams"), ("PATCH", S), ("DELETE", S), ("POST", f"{G}/g/seek"), ("POST", f"{G}/g/pause"),
        ("POST", f"{G}/g/resume"), ("DELETE", f"{G}/g"), ("POST", "/v1/topics"),
    ],
}  # fmt: skip
NEEDED = {call: role for role, calls in CALLS.items() for call in calls}
OURS = ["log", "raw", "mine"]
FIELDS = [
    "data", "bytes", "key", "headers", "time", "name", "partitions", "format", "compression", "keep_age_s", "keep_bytes",
    "compact",
    "session", "limit", "wait", "busy", "ahead", "auto_offset_reset", "commits",
    "partition", "epoch", "revision", "next_offset", "to",
    "offsets",
    "ttl_s", "filter", "since", "id", "unique", "run_after", "expires_at", "background", "timeout", "catch_up", "dead_after_s",
]  # fmt: skip
COMMIT = st.fixed_dictionaries({field: st.integers() for field in ("partition", "epoch", "revision", "next_offset")})
VALUES = (
    st.sampled_from([*OURS, "bytes", "zstd", "earliest", "latest", "0.1s", 0, 1, 3, {"0": 17}, [0], {"dest": "JFK"}])
    | st.binary(max_size=12).map(lambda value: base64.b64encode(value).decode())
    | st.lists(COMMIT, max_size=2)
    | JSON
)
OBJECTS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)
BODIES = (
    OBJECTS.map(lambda value: json.dumps(value).encode())
    | st.lists(OBJECTS, max_size=4).map(lambda lines: "\n".join(map(json.dumps, lines)).encode())
    | torn()
)
PARAMETERS = st.dictionaries(
    st.sampled_from(
        [
            "partition",
            "offset",
            "limit",
            "wait",
            "from",
            "force",
            "producer",
            "sequence",
            "since",
            "drop",
            "session",
            "filter",
            "window",
        ]
    ),
    st.sampled_from(["0", "1", "-1", "0.1s", "earliest", "0:1", "true", "me", '{"a": 1}', "99999999999999999999"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    max_size=3,
)
KINDS = st.sampled_from(["application/json", "application/x-ndjson", "text/plain"])


@pytest.fixture(scope="module")
def roles(databases: TemporaryDatabases) -> Iterator[Served]:
    """A server that does not wait for long, with a user of each role, and one that may touch what is called mine only."""
    brief = {"PENSTOCK_HTTP_LONGEST_WAIT": "0.05", "PENSTOCK_HTTP_LONGEST_LIVE": "0.05"}
    with databases.database() as url:
        for role in Role:
            penstock(url, "users", "add", role.name.lower(), "--role", role.name.lower(), PENSTOCK_USER_PASSWORD=PASSWORD)
        penstock(url, "users", "add", "narrow", "--role", "admin", "-t", "mine", PENSTOCK_USER_PASSWORD=PASSWORD)
        with serving(url, token=None, **brief) as served:
            with served.client(auth=("admin", PASSWORD)) as admin:
                for name in ("log", "mine", "theirs"):
                    assert admin.post("/v1/streams", json={"name": name, "partitions": 2}).status_code == 201
                    assert admin.put(f"/v1/streams/{name}/groups/g/members/m", json={}).status_code == 200
                for name in ("mine", "theirs"):
                    assert admin.post("/v1/topics", json={"name": name, "catch_up": 10}).status_code == 201
                assert admin.post("/v1/streams", json={"name": "raw", "partitions": 2, "format": "bytes"}).status_code == 201
                assert admin.post("/v1/streams/raw/events", json={"bytes": "AAEC"}).status_code == 201
                for path in ("/v1/streams/theirs/events", "/v1/topics/theirs/messages"):
                    assert admin.post(path, json={"data": MARKER}).status_code in (201, 202)
            yield served


def call(client: httpx.Client, method: str, path: str, body: bytes, kind: str, parameters: dict[str, str]) -> httpx.Response:
    content = None if method == "GET" else body
    return client.request(method, path, content=content, headers={"Content-Type": kind}, params=parameters)


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.name.lower())
def test_no_role_does_more_than_it_may(roles: Served, role: Role) -> None:
    with roles.client(auth=(role.name.lower(), PASSWORD)) as client:

        @given(st.sampled_from(list(NEEDED)), st.sampled_from(OURS), BODIES, KINDS, PARAMETERS)
        @settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None, database=None)
        def check(operation: tuple[str, str], name: str, body: bytes, kind: str, parameters: dict[str, str]) -> None:
            method, path = operation
            answer = call(client, method, path.format(name=name), body, kind, parameters)
            assert answer.status_code < 500, answer.text
            assert (answer.status_code == 403) == (role < NEEDED[operation]), (operation, answer.text)

        check()


def test_a_restricted_user_sees_nothing_of_other_streams_and_topics(roles: Served) -> None:
    with roles.client(auth=("narrow", PASSWORD)) as client:

        @given(st.sampled_from(list(NEEDED)), BODIES, KINDS, PARAMETERS)
        @settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None, database=None)
        def check(operation: tuple[str, str], body: bytes, kind: str, parameters: dict[str, str]) -> None:
            method, path = operation
            answer = call(client, method, path.format(name="theirs"), body, kind, parameters)
            assert answer.status_code < 500, answer.text
            assert MARKER not in answer.text
            if "{name}" in path:
                # A call that is wrong in itself is refused for that, in the same words for a name that does not exist.
                assert answer.status_code in (400, 403), (operation, answer.text)
                other = call(client, method, path.format(name="nobodys"), body, kind, parameters)
                assert (other.status_code, other.text.replace("nobodys", "theirs")) == (answer.status_code, answer.text)
            elif method == "GET":
                assert "theirs" not in answer.text

        check()
    with roles.client(auth=("admin", PASSWORD)) as admin:
        # It could have been seen, and is still there.
        assert MARKER in admin.get("/v1/topics/theirs/messages").text
        events = [admin.get("/v1/streams/theirs/events", params={"partition": partition}).text for partition in (0, 1)]
        assert MARKER in "".join(events)


@pytest.mark.parametrize("role", [Role.READ, Role.ENQUEUE, Role.WORK], ids=lambda role: role.name.lower())
def test_every_answer_to_a_role_is_in_the_document(roles: Served, role: Role) -> None:
    touched = [one for label, one in OPERATIONS.items() if "/v1/streams" in label or "/v1/topics" in label]
    assert len(touched) >= 25
    for operation in touched:

        @given(case=operation.as_strategy())
        @settings(max_examples=3, suppress_health_check=list(HealthCheck), deadline=None, database=None)
        def check(case: Any) -> None:
            case.call_and_validate(base_url=roles.base_url, auth=(role.name.lower(), PASSWORD), checks=CHECKS, timeout=30)

        check()
