"""What one user may cost the others: sizes of answers, counting, logins, and who may end whose worker."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.core.cached import Kept
from penstock.http.auth import Authenticator, Credentials, Principal, Refused, Role
from penstock.http.errors import ApiError
from penstock.testing import TemporaryDatabases
from tests.command_line import penstock
from tests.http.http_server import Served, serving

PASSWORD = "password-of-tests"


@pytest.fixture(scope="module")
def with_users(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url:
        for name, role, types in (("ada", "work", ["-t", "a"]), ("bob", "work", ["-t", "b"]), ("root", "admin", [])):
            added = penstock(url, "users", "add", name, "--role", role, *types, PENSTOCK_USER_PASSWORD=PASSWORD)
            assert added.returncode == 0, added.stderr
        with serving(url, token=None) as served:
            yield served


def test_bad_lines_cost_little_more_than_they_are(client: httpx.Client, echo: str) -> None:
    body = b"[\n" * 100_000 + b'{"data": 1}\n' + b"x\n\n" * 50_000 + b'{"data": 2}\n'
    answer = client.post(f"/v1/jobs/{echo}/batch", content=body)
    assert answer.status_code == 200
    lines = [json.loads(line) for line in answer.text.splitlines()]
    single = [line for line in lines if "line" in line and "error" in line]
    ranges = [line for line in lines if "lines" in line]
    assert len(single) == 1_000
    assert [line["line"] for line in lines if "outcome" in line] == [100_001, 200_002]
    refused = {line["line"] for line in single}
    for one in ranges:
        for first, last in one["lines"]:
            assert refused.isdisjoint(range(first, last + 1))
            refused |= set(range(first, last + 1))
    assert refused == {*range(1, 100_001), *range(100_002, 200_002, 2)}
    assert len(answer.content) < 4 * len(body)


async def test_what_is_dear_to_read_is_read_once_for_all_who_ask() -> None:
    import asyncio

    read = 0

    async def reading() -> int:
        nonlocal read
        read += 1
        await asyncio.sleep(0)
        return read

    kept = Kept(reading, kept_s=60)
    assert await asyncio.gather(*(kept() for _ in range(100))) == [1] * 100
    assert (await kept(), read) == (1, 1)


def test_statistics_are_not_counted_for_each_who_asks(client: httpx.Client, echo: str) -> None:
    before = {one["name"]: one["ready"] for one in client.get("/v1/stats").json()}
    client.put(f"/v1/jobs/{echo}/random_id", json={"data": 1})
    again = client.get("/v1/stats").json()
    # Counted a moment ago, before the job came.
    assert {one["name"]: one["ready"] for one in again} == before
    for path in ("/v1/pools", "/metrics", f"/v1/jobs/{echo}/stats"):
        assert client.get(path).status_code == 200


def test_a_type_that_is_newer_than_the_last_count_has_statistics(client: httpx.Client) -> None:
    for _ in range(20):
        name = f"new-{secrets.token_hex(4)}"
        options = {"name": name, "delivery_strategy": "at_least_once", "attempts": 1, "concurrency": 1}
        client.post("/v1/jobs", json=options).raise_for_status()
        answer = client.get(f"/v1/jobs/{name}/stats")
        assert answer.status_code == 200, answer.text
        assert (answer.json()["name"], answer.json()["ready"]) == (name, 0)


@pytest.mark.parametrize("names", [[], ["a"]])
def test_workers_are_seen_and_ended_by_those_who_may_work_their_types(with_users: Served, names: list[str]) -> None:
    id = f"w-{secrets.token_hex(4)}"
    ada, bob, root = ((user, PASSWORD) for user in ("ada", "bob", "root"))
    with with_users.client(auth=None) as client:
        for name in ("a", "b"):
            client.post(
                "/v1/jobs", auth=root, json={"name": name, "delivery_strategy": "at_least_once", "attempts": 1, "concurrency": 1}
            )
        assert client.post(f"/v1/workers/{id}/heartbeat", auth=ada, json={"names": names}).status_code == 200
        assert id not in {one["id"] for one in client.get("/v1/workers", auth=bob).json()}
        assert client.delete(f"/v1/workers/{id}", auth=bob).status_code == 404, "as for one that there is not"
        assert client.post(f"/v1/workers/{id}/heartbeat", auth=bob, json={"names": ["b"]}).status_code == 403
        assert {one["id"]: one["names"] for one in client.get("/v1/workers", auth=ada).json()}[id] == ["a"]
        assert client.delete(f"/v1/workers/{id}", auth=ada).status_code == 204
        # One of a user who may see all, which works on any type.
        assert client.post(f"/v1/workers/{id}/heartbeat", auth=root, json={}).status_code == 200
        assert id not in {one["id"] for one in client.get("/v1/workers", auth=ada).json()}
        assert client.delete(f"/v1/workers/{id}", auth=ada).status_code == 404
        assert client.delete(f"/v1/workers/{id}", auth=root).status_code == 204


@pytest.mark.parametrize(
    "body",
    [
        {"pid": False},
        {"pid": "1"},
        {"in_flight": True},
        {"concurrency": 1.5},
        {"dead_after_s": "30"},
        {"names": "a"},
        {"host": 1},
        {"code_version": 1},
        {"code_version": "v" * 101},
        {"code_version": "v\x00"},
    ],
    ids=str,
)
def test_booleans_are_no_numbers(client: httpx.Client, body: dict[str, Any]) -> None:
    assert client.post("/v1/workers/strict/heartbeat", json=body).json()["id"] == "invalid_parameter"


def test_models_are_strict_everywhere(client: httpx.Client, echo: str) -> None:
    client.post("/v1/pools", json={"name": "strict"})
    for method, path, body in (
        ("PATCH", f"/v1/jobs/{echo}", {"concurrency": True}),
        ("PATCH", f"/v1/jobs/{echo}", {"keep_result": 1}),
        ("PATCH", f"/v1/jobs/{echo}", {"time_limit_s": "5"}),
        ("POST", f"/v1/jobs/{echo}/claim", {"worker": "w", "limit": True}),
        ("POST", f"/v1/jobs/{echo}/extend", {"jobs": [{"id": "x", "attempt": True, "lease": 1}]}),
        ("PUT", "/v1/pools/strict/weights/a", {"weight": True}),
        ("PATCH", "/v1/pools/strict", {"slots": "9"}),
        ("POST", "/v1/streams", {"name": "strict", "partitions": True}),
        ("POST", "/v1/topics", {"name": "strict", "catch_up": False}),
        ("POST", "/v1/jobs", {"name": "s", "delivery_strategy": "at_least_once", "attempts": True, "concurrency": 1}),
        ("POST", "/v1/jobs", {"name": "s", "delivery_strategy": "at_least_once", "attempts": False, "concurrency": 1}),
    ):
        refused = client.request(method, path, json=body)
        assert refused.status_code == 400, (path, body, refused.text)
    assert client.patch(f"/v1/jobs/{echo}", json={"time_limit_s": 5, "concurrency": None, "keep_result": True}).status_code == 200


class _Directory:
    """An authorizer of one's own with one user."""

    async def authorize(self, credentials: Credentials | None) -> Principal:
        assert credentials is not None
        if (credentials.user, credentials.secret) != ("ada", "good"):
            raise Refused
        return Principal("ada", Role.READ)

    async def knows(self, user: str) -> bool:
        return user == "ada"


async def test_no_flood_of_guesses_keeps_a_user_out() -> None:
    import base64

    def header(user: str, secret: str) -> bytes:
        return b"Basic " + base64.b64encode(f"{user}:{secret}".encode())

    async def enter(user: str, secret: str) -> int:
        try:
            await authenticator.enter(header(user, secret), "10.0.0.1", "/")
        except ApiError as error:
            return error.status
        return 200

    authenticator = Authenticator(_Directory())
    assert {await enter(f"user{number}", "x") for number in range(100)} == {403}
    # The address of a proxy: users behind it are admitted, unknown names are refused; the answer does not distinguish them.
    assert await enter("somebody", "x") == 429
    assert await enter("ada", "bad") == 429
    assert await enter("ada", "good") == 200
    for _ in range(10):
        await enter("ada", "bad")
    assert await enter("ada", "other") == 429
    # Who was let in before stays.
    assert await enter("ada", "good") == 200


@pytest.mark.parametrize(
    ("arguments", "given", "environment", "code", "said"),
    [
        (["--password", "visible-to-everybody"], "", {}, 2, "list of processes"),
        (["--password-file", "-"], "from-standard-input\n", {}, 0, "added"),
        (["--password-file", "-"], "short\n", {}, 1, "at least 12"),
        ([], "", {"PENSTOCK_USER_PASSWORD": "short"}, 1, "at least 12"),
        ([], "", {}, 0, "password:"),
    ],
)
def test_passwords_are_long_and_not_on_the_command_line(
    with_users: Served, arguments: list[str], given: str, environment: dict[str, str], code: int, said: str
) -> None:
    name = f"u-{secrets.token_hex(4)}"
    done = penstock(with_users.database_url, "users", "add", name, *arguments, stdin=given, **{"COLUMNS": "300", **environment})
    assert done.returncode == code, (done.stdout, done.stderr)
    assert said in done.stdout + done.stderr
    if code == 0 and given:
        with with_users.client(auth=(name, given.strip())) as client:
            assert client.get("/v1/jobs").status_code == 200
