"""Rickover's API as its clients see it: every route, every error, over a real socket."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.http.http_calls import claim, new_id, put

STATUSLESS = {"title", "id", "detail", "instance"}


def test_a_job_type_is_created(client: httpx.Client) -> None:
    name = f"t-{uuid4()}"
    body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 7, "concurrency": 3}
    response = client.post("/v1/jobs", json=body)
    assert response.status_code == 201
    created = response.json()
    assert list(created) == ["name", "delivery_strategy", "attempts", "concurrency", "created_at"]
    assert {key: created[key] for key in body} == body
    assert datetime.fromisoformat(created["created_at"]).utcoffset() is not None
    assert client.get(f"/v1/jobs/{name}").json() == created


def test_the_documents_id_is_accepted_for_the_name(client: httpx.Client) -> None:
    name = f"t-{uuid4()}"
    body = {"id": name, "delivery_strategy": "at_most_once", "attempts": 1, "concurrency": 1}
    assert client.post("/v1/jobs", json=body).json()["name"] == name


TYPE = {"name": "x", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
BAD_JSON = {"title": "Invalid request: bad JSON. Double check the types of the fields you sent", "id": "invalid_request"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", BAD_JSON),
        ("{", BAD_JSON),
        ("[]", BAD_JSON),
        ({**TYPE, "attempts": "3"}, BAD_JSON),
        ({**TYPE, "attempts": -1}, BAD_JSON),
        ({**TYPE, "attempts": 70000}, BAD_JSON),
        ({**TYPE, "concurrency": -1}, BAD_JSON),
        ({**TYPE, "concurrency": True}, BAD_JSON),
        ({**TYPE, "name": 5}, BAD_JSON),
        (
            {**TYPE, "visibility_timeout_s": "soon"},
            {
                "title": "Invalid visibility_timeout_s: Input should be a valid number",
                "id": "invalid_parameter",
                "instance": "/v1/jobs",
            },
        ),
        (
            {},
            {
                "title": "Missing required field: name",
                "id": "missing_parameter",
                "detail": "Please include a name in the request body",
                "instance": "/v1/jobs",
            },
        ),
        (
            {"name": "x"},
            {"title": "Missing required field: delivery_strategy", "id": "missing_parameter", "instance": "/v1/jobs"},
        ),
        (
            {**TYPE, "delivery_strategy": "foo"},
            {"title": "Invalid delivery strategy: foo", "id": "invalid_delivery_strategy", "instance": "/v1/jobs"},
        ),
        (
            {**TYPE, "delivery_strategy": "at_most_once"},
            {
                "title": "Cannot set retry attempts to a number greater than 1 if the delivery strategy is at_most_once",
                "id": "invalid_attempts",
                "detail": "The at_most_once strategy implies only one attempt will be made.",
            },
        ),
        (
            {**TYPE, "attempts": 0},
            {"title": "Attempts must be set to a number greater than zero", "id": "invalid_parameter"},
        ),
        ({"name": "x", "delivery_strategy": "at_most_once"}, {"title": "Attempts must be set to a number greater than zero"}),
        (
            {**TYPE, "concurrency": 0},
            {"title": "Concurrency must be set to a number greater than zero", "id": "invalid_parameter"},
        ),
    ],
)
def test_a_bad_job_type_is_refused(client: httpx.Client, body: Any, expected: dict[str, Any]) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    response = client.post("/v1/jobs", content=content)
    assert response.status_code == 400
    error = response.json()
    assert expected.items() <= error.items()
    assert set(error) <= STATUSLESS


def test_a_type_that_exists_is_refused(client: httpx.Client, echo: str) -> None:
    response = client.post("/v1/jobs", json={**TYPE, "name": echo})
    assert (response.status_code, response.json()["title"]) == (400, f"A name already exists with this value ({echo})")
    assert response.json()["id"] == "invalid_parameter"


def test_a_name_that_could_never_be_fetched_is_refused(client: httpx.Client) -> None:
    assert client.post("/v1/jobs", json={**TYPE, "name": "job_x"}).status_code == 400


def test_a_job_is_enqueued(client: httpx.Client, echo: str) -> None:
    id = new_id()
    body = {"id": id, "data": {"a": [1, None]}, "run_after": "2036-01-11T18:26:26.000Z", "expires_at": "2036-01-11T20:26:26Z"}
    response = client.put(f"/v1/jobs/{echo}/{id}", json=body)
    assert response.status_code == 202
    job = response.json()
    assert list(job) == [
        "id", "name", "attempts", "run_after", "expires_at", "created_at", "updated_at", "status", "data",
    ]  # fmt: skip
    assert job | {"created_at": 0, "updated_at": 0} == {
        "id": id,
        "name": echo,
        "attempts": 3,
        "run_after": "2036-01-11T18:26:26Z",
        "expires_at": "2036-01-11T20:26:26Z",
        "created_at": 0,
        "updated_at": 0,
        "status": "queued",
        "data": {"a": [1, None]},
    }
    assert client.get(f"/v1/jobs/{echo}/{id}").json() == job
    assert client.get(f"/v1/jobs/{id}").json() == job


def test_the_same_id_again_returns_the_stored_job(client: httpx.Client, echo: str) -> None:
    id = new_id()
    first = put(client, echo, id, {"n": 1})
    assert put(client, echo, id, {"n": 2}, run_after="2036-01-11T18:26:26Z") == first


def test_an_id_without_its_prefix_is_the_same_job(client: httpx.Client, echo: str) -> None:
    id = new_id()
    assert put(client, echo, id.removeprefix("job_"))["id"] == id


def test_random_id_makes_an_id(client: httpx.Client, echo: str) -> None:
    first, second = put(client, echo, "random_id"), put(client, echo, "random_id")
    assert first["id"].startswith("job_")
    assert first["id"] != second["id"]


@pytest.mark.parametrize("data", [None, 5, "text", [1], {"a": {"b": 1}}, True])
def test_data_is_any_json(client: httpx.Client, echo: str, data: Any) -> None:
    id = put(client, echo, data=data)["id"]
    assert client.get(f"/v1/jobs/{id}").json()["data"] == data


def test_no_number_is_rounded(client: httpx.Client, echo: str) -> None:
    id = new_id()
    content = '{"data": [123456789012345678901234567890, 0.12345678901234567890123]}'
    client.put(f"/v1/jobs/{echo}/{id}", content=content)
    assert "123456789012345678901234567890, 0.12345678901234567890123" in client.get(f"/v1/jobs/{id}").text


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"])
def test_the_first_and_the_last_time_are_times(client: httpx.Client, echo: str, time: str) -> None:
    """The first is what a program in Go sends that never set one; the driver takes both for no end."""
    job = put(client, echo, run_after=time)
    assert job["run_after"][:19] == time[:19]
    assert client.get(f"/v1/jobs/{job['id']}").json()["run_after"] == job["run_after"]


def test_data_up_to_the_limit_is_accepted(client: httpx.Client, echo: str) -> None:
    put(client, echo, data="x" * (102_400 - 2))


@pytest.mark.parametrize("characters", [102_400 - 1, 300_000, 2_000_000])
def test_data_over_the_limit_is_refused(client: httpx.Client, echo: str, characters: int) -> None:
    response = client.put(f"/v1/jobs/{echo}/{new_id()}", json={"data": "x" * characters})
    assert response.status_code == 413
    assert response.json()["id"] == "entity_too_large"
    if characters < 1_000_000:
        assert response.json() == {"title": "Data parameter is too large (100KB max)", "id": "entity_too_large"}


def test_the_limit_counts_bytes_as_sent(client: httpx.Client, echo: str) -> None:
    content = json.dumps({"data": "ä" * 60_000}, ensure_ascii=False).encode()
    assert client.put(f"/v1/jobs/{echo}/{new_id()}", content=content).status_code == 413


@pytest.mark.parametrize(
    ("id", "body", "status", "expected"),
    [
        (None, "", 400, BAD_JSON),
        (None, "{", 400, BAD_JSON),
        (None, '{"data": 1} x', 400, BAD_JSON),
        (None, '{"data": 1, "run_after": 5}', 400, BAD_JSON),
        (None, '{"data": 1, "run_after": "soon"}', 400, BAD_JSON),
        (None, '{"data": 1, "run_after": "2036-01-11T18:26:26"}', 400, {"id": "invalid_parameter"}),
        (None, '{"data": 1, "expires_at": "0001-01-01T00:00:00+14:00"}', 400, BAD_JSON),
        (None, '{"data": NaN}', 400, BAD_JSON),
        (None, "{}", 400, {"title": "Missing required field: data", "id": "missing_parameter"}),
        ("job_123", "{}", 400, {"title": "Missing required field: data"}),
        ("job_123", '{"data": 1}', 400, {"title": 'Could not parse "job_123" as a UUID with a prefix', "id": "invalid_uuid"}),
        (
            "job_" + "z" * 36,
            '{"data": 1}',
            400,
            {"title": "incorrect UUID format " + "z" * 36, "id": "invalid_uuid"},
        ),
        (
            "usr_0190b7a0-0000-7000-8000-000000000001",
            '{"data": 1}',
            400,
            {"title": 'Please use "job_" for the uuid prefix, not usr_', "id": "invalid_prefix"},
        ),
        ("job_123", json.dumps({"data": "x" * 200_000}), 400, {"id": "invalid_uuid"}),
        (None, '{"data": "\\u0000"}', 400, {"id": "invalid_parameter"}),
        (None, '{"data": "\\ud800"}', 400, BAD_JSON),
        (None, '{"data": 1, "priority": 1000}', 400, {"id": "invalid_parameter"}),
        (None, '{"data": 1, "priority": 100000}', 400, {"id": "invalid_parameter"}),
        (None, '{"data": 1, "key": ""}', 400, {"id": "invalid_parameter"}),
    ],
)
def test_a_bad_job_is_refused_in_the_order_of_checks(
    client: httpx.Client, echo: str, id: str | None, body: str, status: int, expected: dict[str, Any]
) -> None:
    response = client.put(f"/v1/jobs/{echo}/{id or new_id()}", content=body)
    assert (response.status_code, expected.items() <= response.json().items()) == (status, True), response.text


def test_a_job_of_an_unknown_type_is_refused(client: httpx.Client) -> None:
    response = client.put(f"/v1/jobs/nope/{new_id()}", json={"data": 1})
    assert response.status_code == 404
    assert response.json() == {"title": "Job type nope not found", "id": "job_type_not_found", "instance": "/v1/jobs/nope"}


def test_an_archived_id_is_burnt(client: httpx.Client, echo: str) -> None:
    id = put(client, echo)["id"]
    assert client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": 3}).status_code == 200
    response = client.put(f"/v1/jobs/{echo}/{id}", json={"data": 1})
    assert response.status_code == 400
    assert response.json() == {
        "title": "Job has already been archived",
        "id": "job_already_archived",
        "instance": f"/v1/jobs/{echo}/{id}",
    }


@pytest.mark.parametrize("claimed", [False, True])
def test_a_success_archives_the_job(client: httpx.Client, echo: str, claimed: bool) -> None:
    id = put(client, echo, data={"n": 1})["id"]
    if claimed:
        assert claim(client, echo)[0]["id"] == id
    response = client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": 3})
    assert (response.status_code, response.content) == (200, b"")
    job = client.get(f"/v1/jobs/{echo}/{id}").json()
    assert list(job) == ["id", "name", "attempts", "status", "created_at", "data", "expires_at"]
    assert (job["status"], job["attempts"], job["data"]) == ("succeeded", 3, {"n": 1})


@pytest.mark.parametrize("claimed", [False, True])
def test_a_failure_is_retried_later(client: httpx.Client, echo: str, claimed: bool) -> None:
    id = put(client, echo)["id"]
    if claimed:
        claim(client, echo)
    assert client.post(f"/v1/jobs/{echo}/{id}", json={"status": "failed", "attempt": 3}).status_code == 200
    job = client.get(f"/v1/jobs/{id}").json()
    assert (job["status"], job["attempts"]) == ("queued", 2)
    wait = datetime.fromisoformat(job["run_after"]) - datetime.fromisoformat(job["updated_at"])
    assert 1.5 < wait.total_seconds() < 2.5


def test_a_failure_that_is_not_retryable_is_final(client: httpx.Client, echo: str) -> None:
    id = put(client, echo)["id"]
    body = {"status": "failed", "attempt": 3, "retryable": False, "error": "no such shipment"}
    assert client.post(f"/v1/jobs/{echo}/{id}", json=body).status_code == 200
    job = client.get(f"/v1/jobs/{id}?details=true").json()
    assert (job["status"], job["attempts"], job["errors"][0]["message"]) == ("failed", 2, "no such shipment")


def test_the_failure_of_an_at_most_once_job_is_final(client: httpx.Client) -> None:
    name = f"once-{uuid4()}"
    client.post("/v1/jobs", json={"name": name, "delivery_strategy": "at_most_once", "attempts": 1, "concurrency": 1})
    id = put(client, name)["id"]
    assert client.post(f"/v1/jobs/{name}/{id}", json={"status": "failed", "attempt": 1}).status_code == 200
    assert (client.get(f"/v1/jobs/{id}").json()["status"]) == "failed"


@pytest.mark.parametrize(
    "body",
    [
        {"status": "succeeded", "attempt": 2},
        {"status": "failed", "attempt": 2},
        {"status": "failed", "attempt": 2, "retryable": False},
        {"status": "failed", "attempt": 1},
        {"status": "succeeded", "attempt": 4},
    ],
)
@pytest.mark.parametrize("claimed", [False, True])
def test_a_stale_attempt_is_refused_on_every_branch(client: httpx.Client, echo: str, body: dict[str, Any], claimed: bool) -> None:
    id = put(client, echo)["id"]
    if claimed:
        claim(client, echo)
    response = client.post(f"/v1/jobs/{echo}/{id}", json=body)
    assert (response.status_code, response.json()["id"], response.json()["status"]) == (400, "decrement_failed", 400)
    assert client.get(f"/v1/jobs/{id}").json()["attempts"] == 3


@pytest.mark.parametrize("case", ["unknown", "archived", "other name"])
def test_a_status_for_nothing_is_refused(client: httpx.Client, echo: str, case: str) -> None:
    id = new_id() if case == "unknown" else put(client, echo)["id"]
    if case == "archived":
        client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": 3})
    name = "other" if case == "other name" else echo
    response = client.post(f"/v1/jobs/{name}/{id}", json={"status": "succeeded", "attempt": 3})
    assert response.status_code == 400
    assert response.json() == {
        "title": "This job has already been archived, or was never queued",
        "id": "duplicate_status_request",
        "instance": f"/v1/jobs/{name}/{id}",
    }


@pytest.mark.parametrize(
    ("id", "body", "expected"),
    [
        (None, "", BAD_JSON),
        (None, '{"status": 5}', BAD_JSON),
        (None, '{"status": "succeeded", "attempt": "3"}', BAD_JSON),
        (None, '{"status": "succeeded", "attempt": -1}', BAD_JSON),
        (None, "{}", {"title": "Missing required field: status", "id": "missing_parameter"}),
        (None, '{"status": "success"}', {"title": "Missing required field: attempt", "id": "missing_parameter"}),
        (None, '{"status": "success", "attempt": null}', {"title": "Missing required field: attempt"}),
        (None, '{"status": "success", "attempt": 3}', {"title": "Invalid job status: success", "id": "invalid_status"}),
        ("job_123", '{"status": "success", "attempt": 3}', {"id": "invalid_status"}),
        ("job_123", '{"status": "succeeded", "attempt": 3}', {"id": "invalid_uuid"}),
        ("random_id", '{"status": "succeeded", "attempt": 3}', {"id": "invalid_uuid"}),
    ],
)
def test_a_bad_status_is_refused_in_the_order_of_checks(
    client: httpx.Client, echo: str, id: str | None, body: str, expected: dict[str, Any]
) -> None:
    response = client.post(f"/v1/jobs/{echo}/{id or new_id()}", content=body)
    assert (response.status_code, expected.items() <= response.json().items()) == (400, True), response.text


@pytest.mark.parametrize("path", ["/v1/jobs/{name}/{id}/replay", "/v1/jobs/{id}/replay"])
@pytest.mark.parametrize("state", ["in-progress", "succeeded", "failed"])
def test_a_job_is_replayed(client: httpx.Client, echo: str, path: str, state: str) -> None:
    id = put(client, echo, data={"n": 1}, expires_at="2036-01-11T18:26:26Z")["id"]
    if state == "in-progress":
        claim(client, echo)
    else:
        client.post(f"/v1/jobs/{echo}/{id}", json={"status": state, "attempt": 3, "retryable": False})
    response = client.post(path.format(name=echo, id=id), content="nonsense")
    assert response.status_code == 201
    copy = response.json()
    assert copy["id"] != id
    assert (copy["status"], copy["attempts"], copy["data"]) == ("queued", 3, {"n": 1})
    assert copy["expires_at"] == "2036-01-11T18:26:26Z"


def test_a_queued_job_is_not_replayed(client: httpx.Client, echo: str) -> None:
    id = put(client, echo)["id"]
    response = client.post(f"/v1/jobs/{echo}/{id}/replay")
    assert response.status_code == 400
    assert response.json()["title"] == "Cannot replay a queued job. Wait for it to start"
    assert response.json()["id"] == "invalid_replay_attempt"


@pytest.mark.parametrize("suffix", ["", "/replay", "/cancel"])
def test_a_job_under_another_name_is_not_found(client: httpx.Client, echo: str, suffix: str) -> None:
    id = put(client, echo)["id"]
    response = client.request("POST" if suffix else "GET", f"/v1/jobs/other/{id}{suffix}")
    assert (response.status_code, response.json()["id"]) == (404, "job_not_found")
    assert response.json()["title"] == "Job exists, but with a different name"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs/nope"),
        ("GET", "/v1/jobs/job_0190b7a0-0000-7000-8000-000000000001"),
        ("GET", "/v1/jobs/nope/job_0190b7a0-0000-7000-8000-000000000001"),
        ("POST", "/v1/jobs/nope/job_0190b7a0-0000-7000-8000-000000000001/replay"),
        ("POST", "/v1/jobs/job_0190b7a0-0000-7000-8000-000000000001/replay"),
        ("GET", "/unknown"),
        ("GET", "/v1/jobs/a/b"),
        ("GET", "/v1/jobs/"),
    ],
)
def test_what_is_not_there_is_not_found(client: httpx.Client, method: str, path: str) -> None:
    response = client.request(method, path)
    assert response.status_code == 404
    assert response.json() == {"title": "Resource not found", "id": "not_found", "instance": path, "status": 404}
    assert response.content.endswith(b"}\n")


@pytest.mark.parametrize("path", ["/v1/jobs/echo/random_id", "/v1/jobs/job_123"])
def test_reading_a_bad_id_is_refused(client: httpx.Client, path: str) -> None:
    assert (client.get(path).status_code, client.get(path).json()["id"]) == (400, "invalid_uuid")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/v1/jobs"),
        ("HEAD", "/jobber/queue"),
        ("PUT", "/v1/jobs"),
        ("DELETE", "/v1/jobs/echo/job_0190b7a0-0000-7000-8000-000000000001"),
        ("GET", "/v1/jobs/job_0190b7a0-0000-7000-8000-000000000001/replay"),
        ("POST", "/v1/archived-jobs"),
    ],
)
def test_a_wrong_method_is_answered_without_credentials(client: httpx.Client, method: str, path: str) -> None:
    response = client.request(method, path, auth=None)  # type: ignore[arg-type]
    assert response.status_code == 405
    if method != "HEAD":
        assert response.json() == {"title": "Method not allowed", "id": "method_not_allowed", "instance": path, "status": 405}


def test_an_unknown_path_is_answered_without_credentials(client: httpx.Client) -> None:
    assert client.get("/nothing/here", auth=None).status_code == 404  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "methods"), [("/v1/jobs", "GET, HEAD, POST, OPTIONS"), ("/jobber/queue", "POST, OPTIONS")])
def test_options_lists_the_methods(client: httpx.Client, path: str, methods: str) -> None:
    response = client.options(path, auth=None)  # type: ignore[arg-type]
    assert (response.status_code, response.headers["allow"]) == (200, methods)


@pytest.mark.parametrize("path", ["/v1/jobs", "/nothing", "/"])
def test_headers_that_every_answer_has(client: httpx.Client, path: str) -> None:
    headers = client.get(path).headers
    assert headers["strict-transport-security"] == "max-age=31536000; includeSubDomains"
    # Rickover adds preload, which puts the domain on a list that browsers ship: that is for its owner to decide.
    assert headers["server"].startswith("penstock/")
    expected = "text/html; charset=utf-8" if path == "/" else "application/json; charset=utf-8"
    assert headers["content-type"] == expected


@pytest.mark.parametrize("path", ["/v1/jobs", "/nothing"])
def test_unencrypted_proxy_traffic_is_refused_before_everything(client: httpx.Client, path: str) -> None:
    response = client.get(path, headers={"X-Forwarded-Proto": "http"}, auth=None)  # type: ignore[arg-type]
    assert response.status_code == 403
    assert response.json() == {
        "title": "Server not available over HTTP",
        "id": "insecure_request",
        "detail": "For your security, please use an encrypted connection",
        "instance": path,
        "status": 403,
    }
    assert "strict-transport-security" not in response.headers


@pytest.mark.parametrize("proto", ["https", "gopher"])
def test_other_proxy_traffic_is_accepted(client: httpx.Client, proto: str) -> None:
    assert client.get("/v1/jobs", headers={"X-Forwarded-Proto": proto}).status_code == 200


@pytest.mark.parametrize(
    ("header", "status", "expected"),
    [
        (None, 401, {"title": "Unauthorized. Please include your API credentials", "id": "unauthorized", "instance": "/v1/jobs"}),
        ("Basic !!!", 401, {"id": "unauthorized"}),
        ("Digest x", 401, {"id": "unauthorized"}),
        ("Basic OnNlY3JldA==", 401, {"title": "No authentication provided", "id": "missing_authentication", "status": 401}),
        ("Basic bm9ib2R5OnNlY3JldA==", 403, {"id": "forbidden"}),
        ("Basic YWRtaW46d3Jvbmc=", 403, {"id": "forbidden"}),
        ("Bearer admin.wrong", 403, {"id": "forbidden"}),
    ],
)
def test_bad_credentials_are_refused(client: httpx.Client, header: str | None, status: int, expected: dict[str, Any]) -> None:
    headers = {"Authorization": header} if header else {}
    response = client.get("/v1/jobs", headers=headers, auth=None)  # type: ignore[arg-type]
    assert (response.status_code, expected.items() <= response.json().items()) == (status, True), response.text
    assert ("www-authenticate" in response.headers) == (status == 401)
    if status == 403:
        assert response.json() == {
            "title": "Username or password are invalid. Please double check your credentials",
            "id": "forbidden",
        }


def test_archived_jobs_are_listed_newest_first(client: httpx.Client, echo: str) -> None:
    ids = [put(client, echo, data=n)["id"] for n in range(3)]
    for id, status in zip(ids, ("succeeded", "failed", "succeeded"), strict=True):
        client.post(f"/v1/jobs/{echo}/{id}", json={"status": status, "attempt": 3, "retryable": False})
    listed = client.get("/v1/archived-jobs", params={"name": echo}).json()
    assert [job["id"] for job in listed] == ids[::-1]
    assert list(listed[0]) == ["id", "name", "attempts", "status", "created_at", "data", "expires_at"]
    failed = client.get("/v1/archived-jobs", params={"name": echo, "status": "failed", "limit": 1}).json()
    assert [job["id"] for job in failed] == [ids[1]]
    assert client.get("/v1/archived-jobs", params={"name": "nope"}).json() == []


@pytest.mark.parametrize(
    ("query", "title"),
    [
        ("limit=many", "limit is not a number: many"),
        ("limit=0", "limit cannot be negative"),
        ("limit=-1", "limit cannot be negative"),
        ("limit=101", "limit cannot be greater than 100"),
        ("status=done", "unknown status: done"),
        ("status=queued", "unknown status: queued"),
    ],
)
def test_a_bad_list_is_refused(client: httpx.Client, query: str, title: str) -> None:
    response = client.get(f"/v1/archived-jobs?{query}")
    assert (response.status_code, response.json()["title"], response.json()["status"]) == (400, title, 400)


def test_the_routes_of_rickovers_second_version(client: httpx.Client) -> None:
    name = f"t-{uuid4()}"
    assert client.post("/v2/job-types", json={**TYPE, "name": name}).status_code == 201
    assert client.get(f"/v2/job-types/{name}").json()["name"] == name
    assert name in {job_type["name"] for job_type in client.get("/v2/job-types").json()}


def test_the_home_page(client: httpx.Client) -> None:
    response = client.get("/home")
    assert response.status_code == 200
    assert "penstock version" in response.text
    assert client.get("/home", auth=None).status_code == 401  # type: ignore[arg-type]
