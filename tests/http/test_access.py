"""Users, roles, tokens, and what is never written down."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest

from penstock.http.auth import Authenticator, Credentials, OneUser, Principal, Refused, Role, Throttle
from penstock.http.errors import ApiError
from penstock.testing import TemporaryDatabases
from tests.command_line import penstock
from tests.http.http_server import Served, serving
from tests.waiting import eventually

JOB = "job_0190b7a0-0000-7000-8000-000000000001"


@pytest.fixture(scope="module")
def with_users(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url:
        for role in ("read", "enqueue", "work", "admin"):
            done = penstock(url, "users", "add", f"{role}er", "--role", role, PENSTOCK_USER_PASSWORD=f"{role}-secret-word")
            assert done.returncode == 0, done.stderr
        penstock(
            url, "users", "add", "narrow", "--role", "admin", "-t", "a", "-t", "b", PENSTOCK_USER_PASSWORD="narrow-secret-word"
        )
        with serving(url, token=None, DEBUG_HTTP_TRAFFIC="true", PENSTOCK_HTTP_LOG_REQUESTS="1") as served:
            with served.client(auth=("adminer", "admin-secret-word")) as client:
                for name in ("a", "b", "c"):
                    body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
                    assert client.post("/v1/jobs", json=body).status_code == 201
                    assert client.put(f"/v1/jobs/{name}/random_id", json={"data": 1}).status_code == 202
            yield served


LOOK = [
    ("GET", "/v1/jobs"),
    ("GET", "/v1/schedules"),
    ("GET", "/v1/queued-jobs"),
    ("GET", "/v1/stats"),
    ("GET", "/v1/workers"),
    ("GET", "/v1/doctor"),
    ("GET", "/metrics"),
]
ENQUEUE = [("PUT", "/v1/jobs/a/random_id"), ("POST", f"/v1/jobs/a/{JOB}/replay"), ("POST", f"/v1/jobs/a/{JOB}/cancel")]
ENQUEUE += [("POST", "/v1/jobs/a/batch"), ("POST", "/jobber/queue")]
WORK = [("POST", f"/v1/jobs/a/{JOB}"), ("POST", "/v1/jobs/a/claim"), ("POST", "/v1/jobs/a/settle")]
WORK += [("POST", "/v1/jobs/a/extend"), ("POST", "/v1/workers/w/heartbeat"), ("DELETE", "/v1/workers/nobody")]
ADMIN = [("POST", "/v1/jobs"), ("PATCH", "/v1/jobs/a"), ("POST", "/v1/jobs/a/pause"), ("POST", "/v1/jobs/a/resume")]


@pytest.mark.parametrize("role", ["read", "enqueue", "work", "admin"])
def test_each_role_may_what_it_may(with_users: Served, role: str) -> None:
    rank = Role[role.upper()]
    with with_users.client(auth=(f"{role}er", f"{role}-secret-word")) as client:
        for needed, calls in ((Role.READ, LOOK), (Role.ENQUEUE, ENQUEUE), (Role.WORK, WORK), (Role.ADMIN, ADMIN)):
            for method, path in calls:
                response = client.request(method, path, content=b'{"data": 1}' if method == "PUT" else b"{}")
                refused = response.status_code == 403
                assert refused == (rank < needed), (role, method, path, response.text)
                if refused:
                    assert response.json()["id"] == "forbidden"


def test_the_name_of_a_producer_belongs_to_the_user(with_users: Served) -> None:
    """One user cannot use up the numbers of another's producer, nor can the server's own role."""
    with with_users.client(auth=("adminer", "admin-secret-word")) as client:
        assert client.post("/v1/streams", json={"name": "owned", "partitions": 1}).status_code == 201

        def append(user: str, secret: str, sequence: int) -> dict[str, Any]:
            params: dict[str, Any] = {"producer": "nightly", "sequence": sequence}
            answer = client.post(
                "/v1/streams/owned/events", params=params, json={"data": user}, auth=(user, f"{secret}-secret-word")
            )
            assert answer.status_code == 201, answer.text
            appended: dict[str, Any] = answer.json()
            return appended

        assert append("enqueueer", "enqueue", 1_000_000)["appended"] == 1
        for sequence, offset in ((1, 1), (2, 2), (2, 2)):
            assert (found := append("worker", "work", sequence))["duplicate"] is False
            assert (found["appended"], found["offset"]) == (1, offset)
        assert append("worker", "work", 1)["duplicate"] is True
        events = client.get("/v1/streams/owned/events").json()["events"]
        assert [event["data"] for event in events] == ["enqueueer", "worker", "worker"]


def test_a_restricted_user_sees_only_its_types(with_users: Served) -> None:
    with (
        with_users.client(auth=("narrow", "narrow-secret-word")) as client,
        with_users.client(auth=("reader", "read-secret-word")) as all,
    ):
        assert [one["name"] for one in client.get("/v1/jobs").json()] == ["a", "b"]
        assert {one["name"] for one in client.get("/v1/queued-jobs").json()} == {"a", "b"}
        assert {one["name"] for one in client.get("/v1/stats").json()} == {"a", "b"}
        with with_users.client(auth=("worker", "work-secret-word")) as worker:
            worker.post("/v1/workers/worker-of-c/heartbeat", json={"names": ["c"]})
        assert "worker-of-c" not in client.get("/v1/workers").text
        (hidden,) = all.get("/v1/queued-jobs?name=c").json()
        calls: list[tuple[str, str, Any]] = [
            ("GET", "/v1/jobs/c", None),
            ("PATCH", "/v1/jobs/c", {}),
            ("GET", "/v1/queued-jobs?name=c", None),
            ("GET", "/v1/jobs/c/stats", None),
            ("GET", f"/v1/jobs/c/{hidden['id']}", None),
            ("POST", f"/v1/jobs/c/{hidden['id']}", {"status": "succeeded", "attempt": 3}),
            ("PUT", "/v1/jobs/c/random_id", {"data": 1}),
            ("POST", "/v1/jobs/c/batch", {}),
            ("POST", "/v1/jobs/c/claim", {"worker": "w"}),
            ("POST", "/v1/jobs/c/settle", {"jobs": []}),
            ("POST", "/v1/workers/w/heartbeat", {"names": ["c"]}),
            ("POST", "/v1/workers/worker-of-c/heartbeat", {}),
            ("GET", "/metrics", None),
            ("POST", "/jobber/queue", {"type": "c"}),
            ("POST", "/v1/jobs", {"name": "d", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}),
        ]
        for method, path, body in calls:
            assert client.request(method, path, json=body).status_code == 403, (method, path)
        # What is named by an id alone is, for this user, not there.
        there = (
            ("GET", f"/v1/jobs/{hidden['id']}"),
            ("POST", f"/v1/jobs/{hidden['id']}/cancel"),
            ("DELETE", "/v1/workers/worker-of-c"),
        )
        for method, path in there:
            assert client.request(method, path).status_code == 404, (method, path)
        assert client.put("/v1/jobs/a/random_id", json={"data": 1}).status_code == 202


def test_a_token_is_as_good_as_a_password(with_users: Served) -> None:
    done = penstock(with_users.database_url, "users", "add", "robot")
    token = next(line.split()[-1] for line in done.stdout.splitlines() if line.startswith("token:"))
    headers = {"Authorization": f"Bearer {token}"}
    with with_users.client(auth=None) as client:
        assert client.put("/v1/jobs/a/random_id", json={"data": 1}, headers=headers).status_code == 202
        name, _, secret = token.partition(".")
        assert client.put("/v1/jobs/a/random_id", json={"data": 1}, auth=(name, secret)).status_code == 202


@pytest.mark.parametrize("first", ["reader", "adminer", "nobody"])
def test_two_authorization_headers_are_no_credentials(with_users: Served, first: str) -> None:
    def header(name: str) -> tuple[str, str]:
        secret = f"{name.removesuffix('er')}-secret-word"
        return "Authorization", "Basic " + base64.b64encode(f"{name}:{secret}".encode()).decode()

    second = "adminer" if first == "reader" else "reader"
    with with_users.client(auth=None) as client:
        assert client.get("/v1/jobs", headers=[header(second)]).status_code == 200
        answer = client.get("/v1/jobs", headers=[header(first), header(second)])
    assert (answer.status_code, answer.json()["id"]) == (401, "unauthorized")


async def test_a_removed_user_is_refused_soon(with_users: Served) -> None:
    url = with_users.database_url
    penstock(url, "users", "add", "leaver", PENSTOCK_USER_PASSWORD="leaver-secret")
    with with_users.client(auth=("leaver", "leaver-secret")) as client:
        assert client.get("/v1/jobs").status_code == 200
        assert penstock(url, "users", "remove", "leaver").returncode == 0
        await eventually(lambda: client.get("/v1/jobs").status_code == 403, "the refusal")


def test_users_on_the_command_line(with_users: Served) -> None:
    url = with_users.database_url
    assert penstock(url, "users", "add", "adminer").returncode == 1
    assert penstock(url, "users", "add", "a b").returncode == 1
    assert penstock(url, "users", "add", "x", "--role", "king").returncode == 1
    assert penstock(url, "users", "remove", "nobody").returncode == 1
    changed = penstock(url, "users", "add", "reader", "--role", "read", "--replace", PENSTOCK_USER_PASSWORD="read-secret-word")
    assert changed.returncode == 0
    listed = json.loads(penstock(url, "users", "list", "--json").stdout)
    assert {user["name"]: user["types"] for user in listed}["narrow"] == ["a", "b"]
    assert "secret" not in json.dumps(listed)


async def test_no_database_role_reads_the_hashes(with_users: Served) -> None:
    sql = await asyncpg.connect(with_users.database_url)
    role = f"reader_{uuid4().hex[:8]}"
    try:
        await sql.execute(f"create role {role}")
        await sql.fetch("select penstock.grant_access($1::name, 'reader')", role)
        await sql.execute(f"set role {role}")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await sql.fetch("select * from penstock.users")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await sql.fetch("select * from penstock.find_user('adminer')")
    finally:
        await sql.execute("reset role")
        await sql.execute(f"drop owned by {role}")
        await sql.execute(f"drop role {role}")
        await sql.close()


def test_secrets_are_in_no_log(with_users: Served) -> None:
    marker = "a-visible-payload"
    with with_users.client(auth=("adminer", "admin-secret-word")) as client:
        client.put("/v1/jobs/a/random_id", json={"data": marker}, headers={"Cookie": "session=cookie-secret-word"})
        client.get("/v1/jobs", headers={"Authorization": "Bearer adminer.admin-secret-word"})
        client.get("/v1/jobs", auth=("adminer", "wrong-secret-word"))
    log = with_users.log.read_text() + with_users.said
    assert marker in log, "DEBUG_HTTP_TRAFFIC shows bodies"
    assert "login_refused" in log
    encoded = [base64.b64encode(f"{user}:{secret}".encode()).decode() for user, secret in (("adminer", "admin-secret-word"),)]
    for secret in ("admin-secret-word", "wrong-secret-word", "cookie-secret-word", *encoded):
        assert secret not in log


def test_guessing_is_slowed_down(with_users: Served) -> None:
    with with_users.client(auth=("guessed", "x")) as client:
        statuses = [client.get("/v1/jobs").status_code for _ in range(12)]
        assert statuses == [403] * 10 + [429] * 2
        refused = client.get("/v1/jobs")
        assert (refused.json()["id"], int(refused.headers["retry-after"]) > 0) == ("too_many_failures", True)
    with with_users.client(auth=("reader", "read-secret-word")) as client:
        assert client.get("/v1/jobs").status_code == 200


def test_a_new_install_on_loopback_works_with_the_token_it_prints(url: str) -> None:
    with serving(url, token=None) as served:
        token = next(line.split()[-1] for line in served.said.splitlines() if "token:" in line)
        with served.client(auth=None) as client:
            assert client.get("/v1/jobs", headers={"Authorization": f"Bearer {token}"}).status_code == 200
            assert client.get("/v1/jobs", headers={"Authorization": f"Bearer {token}x"}).status_code == 403
        assert token.partition(".")[2] not in served.log.read_text()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_elsewhere_the_server_refuses_to_start_without_users(url: str, host: str) -> None:
    done = penstock(url, "server", "--host", host, "--port", "0")
    assert (done.returncode, "without users" in done.stderr) == (1, True)


class Ours:
    """An authorizer of an application."""

    async def authorize(self, credentials: Credentials | None) -> Principal:
        if credentials is None:
            return Principal("anonymous", Role.READ)
        if credentials.user == "forbidden":
            raise ApiError(418, "forbidden_api", "This API is not for you")
        raise Refused


async def test_ones_own_authorizer_decides() -> None:
    authenticator = Authenticator(Ours())
    assert (await authenticator.enter(None, "", "/")).name == "anonymous"
    with pytest.raises(Refused):
        await authenticator.enter(b"Basic " + base64.b64encode(b"x:y"), "", "/")
    with pytest.raises(ApiError) as refused:
        await authenticator.enter(b"Basic " + base64.b64encode(b"forbidden:y"), "", "/")
    assert (refused.value.status, "WWW-Authenticate" in refused.value.headers) == (401, True)


async def test_failures_of_one_client_are_limited_whatever_the_user() -> None:
    throttle = Throttle(per_user=10, per_client=5)
    for number in range(5):
        throttle.failed("192.0.2.1", f"user-{number}")
    with pytest.raises(ApiError):
        throttle.check("192.0.2.1", "another")
    throttle.check("192.0.2.2", "another")


async def test_who_was_let_in_is_not_kept_out_by_the_failures_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    authenticator = Authenticator(OneUser("ada", "s3cret"))
    good = b"Basic " + base64.b64encode(b"ada:s3cret")
    await authenticator.enter(good, "proxy", "/")
    for number in range(100):
        with pytest.raises(ApiError):
            await authenticator.enter(b"Basic " + base64.b64encode(b"user%d:x" % number), "proxy", "/")
    with pytest.raises(ApiError) as refused:
        await authenticator.enter(b"Basic " + base64.b64encode(b"bob:x"), "proxy", "/")
    assert refused.value.status == 429
    # The two seconds for which the answer of the authorizer is kept have passed.
    monkeypatch.setattr("penstock.http.auth.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 2.5))
    assert (await authenticator.enter(good, "proxy", "/")).name == "ada"


async def test_who_is_known_is_not_asked_again() -> None:
    authenticator = Authenticator(OneUser("ada", "s3cret"))
    header = b"Basic " + base64.b64encode(b"ada:s3cret")
    assert authenticator.known(header) is None
    entered = await authenticator.enter(header, "", "/")
    assert authenticator.known(header) is entered
    assert authenticator.known(header + b"x") is None


def test_credentials_do_not_show_their_secret() -> None:
    assert "s3cret" not in repr(Credentials("ada", "s3cret"))


async def test_guesses_at_the_same_time_do_not_slip_through_together(with_users: Served) -> None:
    async with httpx.AsyncClient(base_url=with_users.base_url, timeout=60) as client:

        async def guess(secret: str) -> int:
            headers = {"X-Forwarded-For": secret}
            return (await client.get("/v1/jobs", auth=("someone", secret), headers=headers)).status_code

        statuses = await asyncio.gather(*(guess(f"guess-{n}") for n in range(40)))
        assert sorted(statuses) == [403] * 10 + [429] * 30


async def test_many_first_requests_with_good_credentials_are_all_let_in(with_users: Served) -> None:
    async with httpx.AsyncClient(base_url=with_users.base_url, timeout=60, auth=("worker", "work-secret-word")) as client:
        answers = await asyncio.gather(*(client.get("/v1/jobs") for _ in range(40)))
        assert {answer.status_code for answer in answers} == {200}


async def test_good_ones_among_many_at_once_pass() -> None:
    class Slow:
        async def authorize(self, credentials: Credentials | None) -> Principal:
            assert credentials is not None
            await asyncio.sleep(0)
            if credentials.secret != "good":
                raise Refused
            return Principal(credentials.user, Role.READ)

    authenticator = Authenticator(Slow())
    good = b"Basic " + base64.b64encode(b"ada:good")
    assert len(await asyncio.gather(*(authenticator.enter(good, "here", "/") for _ in range(500)))) == 500
    many = await asyncio.gather(
        *(authenticator.enter(b"Basic " + base64.b64encode(b"user%d:good" % n), "here", "/") for n in range(300))
    )
    assert len(many) == 300


def test_an_id_of_another_type_shows_nothing_of_it(with_users: Served) -> None:
    with (
        with_users.client(auth=("adminer", "admin-secret-word")) as admin,
        with_users.client(auth=("narrow", "narrow-secret-word")) as narrow,
    ):
        hidden = f"job_{uuid4()}"
        assert admin.put(f"/v1/jobs/c/{hidden}", json={"data": "hidden-data"}).status_code == 202
        mine = narrow.put("/v1/jobs/a/random_id", json={"data": 1}).json()["id"]
        assert admin.post(f"/v1/jobs/a/{mine}", json={"status": "succeeded", "attempt": 3}).status_code == 200
        answers = {
            403: [narrow.put(f"/v1/jobs/a/{hidden}", json={"data": 1})],
            404: [
                narrow.get(f"/v1/jobs/{hidden}"),
                narrow.post(f"/v1/jobs/{hidden}/cancel"),
                narrow.get(f"/v1/jobs/a/{hidden}"),
                narrow.post(f"/v1/jobs/a/{hidden}/cancel"),
            ],
            409: [narrow.post(f"/v1/jobs/{mine}/replay", params={"new_id": hidden})],
        }
        for status, given in answers.items():
            for answer in given:
                assert answer.status_code == status, answer.text
                assert "hidden-data" not in answer.text
                assert "job type" not in answer.text
