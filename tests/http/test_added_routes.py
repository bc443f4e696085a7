"""What Penstock adds to Rickover's API: types, lists, waiting, results, cancel, pause, statistics, Jobber."""

from __future__ import annotations

import threading
import time
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.http.http_calls import claim, new_id, put, settle


def test_a_type_is_changed(client: httpx.Client, echo: str) -> None:
    changed = client.patch(f"/v1/jobs/{echo}", json={"concurrency": 7, "visibility_timeout_s": 90.5, "keep_result": True}).json()
    assert (changed["concurrency"], changed["visibility_timeout_s"], changed["keep_result"]) == (7, 90.5, True)
    assert client.get(f"/v1/jobs/{echo}?details=true").json() == changed
    assert changed["max_attempts"] == 3


def test_types_have_rickovers_times(client: httpx.Client, echo: str) -> None:
    details = client.get(f"/v1/jobs/{echo}?details=true").json()
    assert (details["visibility_timeout_s"], details["time_limit_s"]) == (420, 300)


@pytest.mark.parametrize(
    ("body", "title"),
    [
        ({"concurency": 1}, "Invalid concurency: Extra inputs are not permitted"),
        ({"max_attempts": 0}, "Invalid max_attempts: Input should be greater than or equal to 1"),
        ({"delivery_strategy": "at_most_once"}, "an at_most_once type has 1 attempt, not 3"),
        (
            {"max_attempts": None},
            "only concurrency, time_limit, rate_limit, rate_period, keep_succeeded, keep_failed, max_waiting and max_crashes may "
            "be null",
        ),
        ({"rate_limit": 5}, "rate_limit and rate_period go together"),
        ({"keep_failed_s": 0}, "Invalid keep_failed_s: Input should be greater than 0"),
        ({"keep_succeeded_s": 31_536_001}, "Invalid keep_succeeded_s: Input should be less than or equal to 31536000"),
    ],
)
def test_a_bad_change_is_refused(client: httpx.Client, echo: str, body: Any, title: str) -> None:
    response = client.patch(f"/v1/jobs/{echo}", json=body)
    assert response.status_code == 400
    assert title in response.json()["title"]


@pytest.mark.parametrize(
    ("method", "suffix"), [("PATCH", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/claim")]
)
def test_an_unknown_type_is_not_found(client: httpx.Client, method: str, suffix: str) -> None:
    response = client.request(method, f"/v1/jobs/nope{suffix}", json={"worker": "w"} if suffix == "/claim" else {})
    assert (response.status_code, response.json()["id"]) == (404, "job_type_not_found")


def test_a_type_is_dropped_with_what_waits_only_when_forced(client: httpx.Client, echo: str) -> None:
    id = put(client, echo)["id"]
    refused = client.delete(f"/v1/jobs/{echo}")
    assert (refused.status_code, refused.json()["id"]) == (409, "conflict")
    assert refused.json()["title"] == f"jobs of {echo} wait"
    assert client.delete(f"/v1/jobs/{echo}", params={"force": "true"}).status_code == 204
    assert client.get(f"/v1/jobs/{echo}").status_code == 404
    assert client.get(f"/v1/jobs/{id}").json()["status"] == "cancelled"
    assert client.put(f"/v1/jobs/{echo}/{id}", json={"data": {}}).status_code == 404


def test_types_are_listed(client: httpx.Client, echo: str) -> None:
    assert echo in {job_type["name"] for job_type in client.get("/v1/jobs").json()}


def test_a_paused_type_is_not_claimed(client: httpx.Client, echo: str) -> None:
    put(client, echo)
    assert client.post(f"/v1/jobs/{echo}/pause").json()["paused_at"]
    assert claim(client, echo) == []
    assert client.post(f"/v1/jobs/{echo}/resume").json()["paused_at"] is None
    assert len(claim(client, echo)) == 1


def test_a_type_without_concurrency_cannot_be_resumed(client: httpx.Client, echo: str) -> None:
    client.patch(f"/v1/jobs/{echo}", json={"concurrency": 0})
    response = client.post(f"/v1/jobs/{echo}/resume")
    assert (response.status_code, response.json()["id"], response.json()["status"]) == (409, "conflict", 409)


@pytest.mark.parametrize("path", ["/v1/jobs/{name}/{id}/cancel", "/v1/jobs/{id}/cancel"])
def test_a_job_is_cancelled(client: httpx.Client, echo: str, path: str) -> None:
    id = put(client, echo)["id"]
    assert client.post(path.format(name=echo, id=id)).json() == {"id": id, "status": "cancelled"}
    assert client.post(path.format(name=echo, id=id)).json() == {"id": id, "status": "cancelled"}
    assert client.get(f"/v1/jobs/{id}").json()["status"] == "cancelled"


@pytest.mark.parametrize("path", ["/v1/jobs/{name}/{id}/priority", "/v1/jobs/{id}/priority"])
def test_a_job_that_waits_gets_another_priority(client: httpx.Client, echo: str, path: str) -> None:
    first, second = put(client, echo)["id"], put(client, echo)["id"]
    wanted = path.format(name=echo, id=second)
    assert client.post(wanted, json={"priority": -3}).json() == {"id": second, "changed": True}
    assert client.post(wanted, json={"priority": -3}).json() == {"id": second, "changed": False}
    assert client.get(f"/v1/jobs/{second}?details=true").json()["priority"] == -3
    assert [job["id"] for job in claim(client, echo, limit=1)] == [second]
    assert client.post(wanted, json={"priority": 0}).json() == {"id": second, "changed": False}, "it runs"
    for body in ({"priority": 101}, {"priority": "1"}, {}):
        assert client.post(path.format(name=echo, id=first), json=body).status_code == 400
    operation = {"kind": "set-priority", "filter": {"name": echo}, "priority": 7}
    assert client.post("/v1/operations/preview", json=operation).json()["jobs"] == 1
    assert client.post("/v1/operations", json={**operation, "priority": 700}).status_code == 400
    for route in ("/v1/operations", "/v1/operations/preview"):
        refused = client.post(route, json={"kind": "set-priority", "filter": {"name": echo}})
        assert (refused.status_code, "set-priority needs the new priority" in refused.text) == (400, True)


@pytest.mark.parametrize("path", ["/v1/jobs/{name}/{id}/run-now", "/v1/jobs/{id}/run-now"])
def test_a_deferred_job_is_made_due(client: httpx.Client, echo: str, path: str) -> None:
    later = [put(client, echo, run_after="2099-01-01T00:00:00Z")["id"] for _ in range(3)]
    assert claim(client, echo, limit=5) == []
    wanted = path.format(name=echo, id=later[0])
    assert client.post(wanted).json() == {"id": later[0], "changed": True}
    assert client.post(wanted).json() == {"id": later[0], "changed": False}
    assert [job["id"] for job in claim(client, echo, limit=5)] == [later[0]]
    assert client.post(path.format(name=echo, id=f"job_{uuid4()}")).status_code == 404
    operation = {"kind": "run-now", "filter": {"name": echo}}
    assert client.post("/v1/operations/preview", json=operation).json()["jobs"] == 2
    assert client.post("/v1/operations", json={**operation, "priority": 7}).status_code == 400
    assert client.post("/v1/operations", json=operation).json()["kind"] == "run-now"


def test_of_a_running_job_the_worker_is_told(client: httpx.Client, echo: str) -> None:
    id = put(client, echo)["id"]
    worker = f"w-{uuid4().hex[:8]}"
    client.post(f"/v1/workers/{worker}/heartbeat", json={})
    (job,) = claim(client, echo, worker=worker)
    assert client.post(f"/v1/jobs/{echo}/{id}/cancel").json()["status"] == "cancelling"
    assert client.post(f"/v1/workers/{worker}/heartbeat").json()["cancelled"] == [id]
    assert settle(client, echo, job, outcome="cancelled") == "cancelled"


def test_the_result_of_a_job(client: httpx.Client, echo: str) -> None:
    client.patch(f"/v1/jobs/{echo}", json={"keep_result": True})
    id = put(client, echo)["id"]
    response = client.get(f"/v1/jobs/{echo}/{id}/result")
    assert (response.status_code, response.json()["status"]) == (202, "queued")
    client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": 3, "result": {"price": 17.15}})
    response = client.get(f"/v1/jobs/{echo}/{id}/result")
    assert (response.status_code, response.json()) == (
        200,
        {"id": id, "status": "succeeded", "result": {"price": 17.15}, "errors": []},
    )


def test_no_result_is_kept_unless_the_type_wants_it(client: httpx.Client, echo: str) -> None:
    id = put(client, echo)["id"]
    client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": 3, "result": 1})
    assert client.get(f"/v1/jobs/{echo}/{id}/result").json()["result"] is None


@pytest.mark.parametrize("path", ["/v1/jobs/{name}/{id}", "/v1/jobs/{id}", "/v1/jobs/{name}/{id}/result"])
def test_waiting_for_a_job(client: httpx.Client, echo: str, path: str) -> None:
    id = put(client, echo)["id"]
    answers: list[dict[str, Any]] = []
    waiting = threading.Thread(
        target=lambda: answers.append(client.get(path.format(name=echo, id=id), params={"wait": "30s"}).json())
    )
    waiting.start()
    client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": 3})
    waiting.join(20)
    assert answers[0]["status"] == "succeeded"


def test_a_wait_ends_with_its_time(client: httpx.Client, echo: str) -> None:
    id = put(client, echo)["id"]
    started = time.monotonic()
    assert client.get(f"/v1/jobs/{id}?wait=200ms").json()["status"] == "queued"
    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize("wait", ["soon", "-1s", "1d", "1e3"])
def test_a_bad_wait_is_refused(client: httpx.Client, echo: str, wait: str) -> None:
    id = put(client, echo)["id"]
    assert client.get(f"/v1/jobs/{id}", params={"wait": wait}).status_code == 400


@pytest.mark.parametrize("list_path", ["/v1/queued-jobs", "/v1/archived-jobs"])
def test_pages_have_every_job_once(client: httpx.Client, echo: str, list_path: str) -> None:
    ids = [put(client, echo, key="acme" if n % 2 else "blue")["id"] for n in range(7)]
    if "archived" in list_path:
        for id in ids:
            client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": 3})
    seen: list[str] = []
    path: str | None = f"{list_path}?name={echo}&limit=2"
    while path:
        response = client.get(path)
        seen += [job["id"] for job in response.json()]
        path = response.links["next"]["url"] if "next" in response.links else None
    assert seen == ids[::-1]
    by_key = client.get(list_path, params={"name": echo, "key": "acme", "details": True}).json()
    assert {job["key"] for job in by_key} == {"acme"}
    assert len(by_key) == 3


def test_a_list_of_an_unknown_type_is_not_found(client: httpx.Client, echo: str) -> None:
    for path in ("/v1/queued-jobs", "/v1/archived-jobs?details=true"):
        missing = client.get(path, params={**httpx.URL(path).params, "name": f"{echo}s"})
        assert missing.status_code == 404
        assert missing.json() == {
            "title": f"Job type {echo}s not found",
            "id": "job_type_not_found",
            "detail": f"Did you mean {echo!r}?",
            "instance": f"/v1/jobs/{echo}s",
        }
        assert client.get(path, params={**httpx.URL(path).params, "name": echo}).json() == []
    # As Rickover answers it.
    assert client.get("/v1/archived-jobs", params={"name": f"{echo}s"}).json() == []


def test_lists_by_time(client: httpx.Client, echo: str) -> None:
    first = put(client, echo)
    second = put(client, echo)
    since = client.get("/v1/queued-jobs", params={"name": echo, "since": second["created_at"]}).json()
    until = client.get("/v1/queued-jobs", params={"name": echo, "until": second["created_at"]}).json()
    assert ([job["id"] for job in since], [job["id"] for job in until]) == ([second["id"]], [first["id"]])


@pytest.mark.parametrize("query", ["since=yesterday", "until=2036-01-01T00:00:00", "cursor=x", "cursor=%00", "status=failed"])
def test_a_bad_page_is_refused(client: httpx.Client, query: str) -> None:
    assert client.get(f"/v1/queued-jobs?{query}").status_code == 400


def test_statistics(client: httpx.Client, echo: str) -> None:
    put(client, echo)
    put(client, echo, run_after="2036-01-11T18:26:26Z")
    claim(client, echo)
    put(client, echo)
    stats = client.get(f"/v1/jobs/{echo}/stats").json()
    assert (stats["ready"], stats["deferred"], stats["in_progress"], stats["paused"]) == (1, 1, 1, False)
    assert stats["oldest_ready_s"] >= 0
    assert stats["enqueued_per_s"] == pytest.approx(3 / 60)
    assert stats in [one | {"oldest_ready_s": stats["oldest_ready_s"]} for one in client.get("/v1/stats").json()]
    assert client.get("/v1/jobs/nope/stats").status_code == 404


def test_unique_jobs_coalesce(client: httpx.Client, echo: str) -> None:
    first = put(client, echo, data=1, unique="acme")
    assert put(client, echo, data=2, unique="acme") == first


def test_priorities_and_keys(client: httpx.Client, echo: str) -> None:
    put(client, echo, data="late", priority=5)
    put(client, echo, data="soon", priority=-5, key="acme")
    jobs = claim(client, echo, limit=2)
    assert [(job["data"], job["priority"], job["key"]) for job in jobs] == [("soon", -5, "acme"), ("late", 5, None)]


def test_a_repeated_replay_with_an_id_replays_once(client: httpx.Client, echo: str) -> None:
    id, copy = put(client, echo)["id"], new_id()
    client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": 3})
    for _ in range(2):
        assert client.post(f"/v1/jobs/{id}/replay", params={"new_id": copy}).json()["id"] == copy
    assert client.get(f"/v1/jobs/{copy}?details=true").json()["replay_of"] == id


def test_jobber_makes_the_type_on_first_use(client: httpx.Client) -> None:
    name = f"jobber-{uuid4()}"
    for payload in ({"to": "ada"}, {"to": "bob"}):
        response = client.post("/jobber/queue", json={"type": name, "payload": payload})
        assert (response.status_code, list(response.json())) == (201, ["job-id"])
    details = client.get(f"/v1/jobs/{name}?details=true").json()
    assert (details["visibility_timeout_s"], details["concurrency"]) == (15, None)
    jobs = claim(client, name, limit=10)
    assert [job["data"] for job in jobs] == [{"to": "ada"}, {"to": "bob"}]


@pytest.mark.parametrize("body", ["", "{", "{}", '{"type": "  "}', '{"type": 5}', '{"payload": {}}', "[]"])
def test_jobber_refuses_other_bodies(client: httpx.Client, body: str) -> None:
    response = client.post("/jobber/queue", content=body)
    assert (response.status_code, response.json()["title"]) == (400, "Request body is not in the right format")


def test_health(client: httpx.Client) -> None:
    assert client.get("/healthz", auth=None).text == "ok\n"  # type: ignore[arg-type]
    assert client.get("/readyz", auth=None).text == "ready\n"  # type: ignore[arg-type]


def test_the_viewer_loads_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    assert "://" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for file in ("swagger-ui.css", "swagger-ui-bundle.js", "start.js", "favicon.png"):
        assert client.get(f"/docs/{file}").status_code == 200
    assert client.get("/docs/nope.js").status_code == 404
    document = client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"


def test_metrics(client: httpx.Client, echo: str) -> None:
    put(client, echo)
    text = client.get("/metrics").text
    assert f'penstock_jobs_enqueued_total{{outcome="queued",type="{echo}"}} 1.0' in text
    assert 'penstock_http_requests_total{method="PUT",route="/v1/jobs/{name}/{id}",status="202"}' in text
    for name in ("penstock_jobs_ready{", "penstock_oldest_ready_seconds{", "penstock_http_request_seconds_bucket{"):
        assert name in text
    assert client.get("/metrics", auth=None).status_code == 401  # type: ignore[arg-type]
