"""Every route by every role, and what a user of some job types gets from it.

The routes come from the application itself, so that one without an entry here fails.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from penstock import Penstock
from penstock.http.auth import Role
from penstock.http.server import http_routes
from penstock.http.user_queries import add_user
from penstock.http.users import hash_secret
from penstock.testing import TemporaryDatabases
from tests.http.http_server import Served, serving

# Role (- is open to all), method, path, and what an admin of the job types "mine" alone gets of "theirs": "no" is refused,
# "none" is not found, "own" an answer in which nothing of theirs is, "-" nothing to protect.
ROUTES = """
-       GET     /healthz                                                        -
-       GET     /readyz                                                         -
read    GET     /metrics                                                        no
read    GET     /home                                                           -
-       GET     /docs                                                           -
-       GET     /docs/{file}                                                    -
-       GET     /openapi.json                                                   -
enqueue PUT     /v1/jobs/{name}/{id}                                            no
work    POST    /v1/jobs/{name}/{id}                                            no
read    GET     /v1/jobs/{id}                                                   none
read    GET     /v1/jobs/{name}/{id}                                            no
read    GET     /v1/jobs/{name}/{id}/result                                     no
enqueue POST    /v1/jobs/{id}/replay                                            none
enqueue POST    /v1/jobs/{name}/{id}/replay                                     no
enqueue POST    /v1/jobs/{id}/cancel                                            none
enqueue POST    /v1/jobs/{name}/{id}/cancel                                     no
enqueue POST    /v1/jobs/{id}/signals/{signal}                                  none
enqueue POST    /v1/jobs/{name}/{id}/signals/{signal}                           no
read    GET     /v1/jobs/{id}/steps                                             none
read    GET     /v1/jobs/{name}/{id}/steps                                      no
enqueue POST    /v1/jobs/{id}/priority                                          none
enqueue POST    /v1/jobs/{name}/{id}/priority                                   no
enqueue POST    /v1/jobs/{id}/run-now                                           none
enqueue POST    /v1/jobs/{name}/{id}/run-now                                    no
admin   POST    /v2/job-types                                                   no
admin   POST    /v1/jobs                                                        no
read    GET     /v2/job-types                                                   own
read    GET     /v1/jobs                                                        own
read    GET     /v1/handlers                                                    own
read    GET     /v1/leaders                                                     own
read    GET     /v1/doctor                                                      no
read    GET     /v2/job-types/{name}                                            no
read    GET     /v1/jobs/{name}                                                 no
admin   PATCH   /v1/jobs/{name}                                                 no
admin   DELETE  /v1/jobs/{name}                                                 no
admin   POST    /v1/jobs/{name}/pause                                           no
admin   POST    /v1/jobs/{name}/resume                                          no
enqueue POST    /v1/jobs/{name}/batch                                           no
work    POST    /v1/jobs/{name}/claim                                           no
work    POST    /v1/jobs/{name}/extend                                          no
work    POST    /v1/jobs/{name}/settle                                          no
read    GET     /v1/workers                                                     own
work    POST    /v1/workers/{id}/heartbeat                                      no
work    DELETE  /v1/workers/{id}                                                none
admin   POST    /v1/workers/{id}/drain                                          none
read    GET     /v1/fleets                                                      no
admin   POST    /v1/fleets/{name}/drain                                         no
read    GET     /v1/queued-jobs                                                 own
read    GET     /v1/archived-jobs                                               own
read    GET     /v1/stats                                                       own
read    GET     /v1/overview                                                    own
read    GET     /v1/top/types                                                   own
read    GET     /v1/top/keys                                                    own
read    GET     /v1/jobs/{name}/stats                                           no
enqueue POST    /jobber/queue                                                   no
read    GET     /v1/pools                                                       own
admin   POST    /v1/pools                                                       no
read    GET     /v1/pools/{pool}                                                no
admin   PATCH   /v1/pools/{pool}                                                no
admin   DELETE  /v1/pools/{pool}                                                no
enqueue POST    /v1/pools/{pool}/jobs                                           no
read    GET     /v1/pools/{pool}/jobs                                           no
read    GET     /v1/pools/{pool}/workers                                        no
read    GET     /v1/pools/{pool}/workers/{id}                                   no
admin   POST    /v1/pools/{pool}/workers/{id}/drain                             no
admin   POST    /v1/pools/{pool}/workers/{id}/undrain                           no
read    GET     /v1/pools/{pool}/quarantined                                    no
admin   POST    /v1/pools/{pool}/quarantined/{key}                              no
read    GET     /v1/pools/{pool}/keys/{key}                                     no
admin   POST    /v1/pools/{pool}/keys/{key}/pause                               no
admin   POST    /v1/pools/{pool}/keys/{key}/resume                              no
read    GET     /v1/pools/{pool}/paused                                         no
read    GET     /v1/pools/{pool}/weights                                        no
admin   PUT     /v1/pools/{pool}/weights/{key}                                  no
read    GET     /v1/scale                                                       own
enqueue POST    /v1/operations/preview                                          no
enqueue POST    /v1/operations                                                  no
admin   POST    /v1/erasures/preview                                            no
admin   POST    /v1/erasures                                                    no
read    GET     /v1/operations                                                  own
read    GET     /v1/operations/{id}                                             none
enqueue POST    /v1/operations/{id}/cancel                                      none
read    GET     /v1/workflow-runs                                               no
read    GET     /v1/workflow-runs/{name}                                        no
enqueue POST    /v1/workflow-runs/{name}/cancel                                 no
enqueue POST    /v1/workflow-runs/{name}/retry                                  no
enqueue POST    /v1/workflow-runs/{name}/start                                  no
read    GET     /v1/workflow-runs/{name}/steps                                  no
enqueue POST    /v1/workflows                                                   no
read    GET     /v1/workflows                                                   no
read    GET     /v1/workflows/{name}                                            no
enqueue POST    /v1/workflows/{name}/seal                                       no
enqueue POST    /v1/workflows/{name}/cancel                                     no
read    GET     /v1/schedules                                                   own
read    GET     /v1/schedules/{name}                                            no
read    GET     /v1/schedules/{name}/runs                                       no
enqueue POST    /v1/schedules/{name}/run                                        no
admin   DELETE  /v1/schedules/{name}                                            no
read    GET     /v1/pools/{pool}/standing                                       no
enqueue PUT     /v1/pools/{pool}/standing                                       no
read    GET     /v1/pools/{pool}/standing/{key}                                 no
enqueue PUT     /v1/pools/{pool}/standing/{key}                                 no
enqueue DELETE  /v1/pools/{pool}/standing/{key}                                 no
enqueue POST    /v1/pools/{pool}/standing/{key}/messages                        no
read    GET     /v1/streams                                                     own
admin   POST    /v1/streams                                                     no
read    GET     /v1/streams/{name}                                              no
admin   PATCH   /v1/streams/{name}                                              no
admin   DELETE  /v1/streams/{name}                                              no
admin   POST    /v1/streams/{name}/replay-dead                                  no
enqueue POST    /v1/streams/{name}/events                                       no
read    GET     /v1/streams/{name}/events                                       no
read    GET     /v1/streams/{name}/events/follow                                no
read    GET     /v1/streams/{name}/groups                                       no
read    GET     /v1/streams/{name}/groups/{group}                               no
admin   DELETE  /v1/streams/{name}/groups/{group}                               no
admin   POST    /v1/streams/{name}/groups/{group}/seek                          no
admin   POST    /v1/streams/{name}/groups/{group}/pause                         no
admin   POST    /v1/streams/{name}/groups/{group}/resume                        no
work    PUT     /v1/streams/{name}/groups/{group}/members/{member}              no
work    POST    /v1/streams/{name}/groups/{group}/members/{member}/heartbeat    no
work    POST    /v1/streams/{name}/groups/{group}/members/{member}/read         no
work    POST    /v1/streams/{name}/groups/{group}/members/{member}/commit       no
work    POST    /v1/streams/{name}/groups/{group}/members/{member}/failures     no
work    DELETE  /v1/streams/{name}/groups/{group}/members/{member}              no
read    GET     /v1/topics                                                      own
admin   POST    /v1/topics                                                      no
read    GET     /v1/topics/{topic}                                              no
read    GET     /v1/topics/{topic}/subscribers                                  no
work    PUT     /v1/topics/{topic}/subscribers/{client_id}                      no
work    POST    /v1/topics/{topic}/subscribers/{client_id}/renew                no
work    DELETE  /v1/topics/{topic}/subscribers/{client_id}                      no
enqueue POST    /v1/topics/{topic}/messages                                     no
read    GET     /v1/topics/{topic}/messages                                     no
work    GET     /v1/topics/{topic}/deliveries                                   no
work    SOCKET  /v1/topics/{topic}/deliveries                                   no
"""
TABLE = {(method, path): (role, theirs) for role, method, path, theirs in (line.split() for line in ROUTES.split("\n") if line)}
USERS = ["read", "enqueue", "work", "admin"]
JOB = "job_0190b7a0-0000-7000-8000-000000000001"
OPERATION = "0190b7a0-0000-7000-8000-000000000002"
# What a call needs so that it would do something.
PARAMETERS: dict[tuple[str, str], dict[str, Any]] = {
    ("GET", "/v1/topics/{topic}/deliveries"): {"client_id": "theirs"},
    ("SOCKET", "/v1/topics/{topic}/deliveries"): {"client_id": "theirs"},
}
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/v2/job-types"): {"name": "theirs-too", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5},
    ("POST", "/v1/jobs"): {"name": "theirs-too", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5},
    ("PUT", "/v1/jobs/{name}/{id}"): {"data": 1},
    ("POST", "/v1/jobs/{name}/{id}"): {"status": "succeeded", "attempt": 3},
    ("POST", "/v1/jobs/{id}/priority"): {"priority": 1},
    ("POST", "/v1/jobs/{name}/{id}/priority"): {"priority": 1},
    ("POST", "/v1/jobs/{name}/claim"): {"worker": "w"},
    ("POST", "/v1/jobs/{name}/settle"): {"jobs": [{"id": JOB, "attempt": 1, "lease": 1, "outcome": "succeeded"}]},
    ("POST", "/v1/jobs/{name}/extend"): {"jobs": [{"id": JOB, "attempt": 1, "lease": 1}], "for_s": 300},
    ("POST", "/jobber/queue"): {"type": "theirs", "payload": {}},
    ("POST", "/v1/pools"): {"name": "theirs-too", "slots": 4},
    ("POST", "/v1/operations/preview"): {"kind": "cancel", "filter": {"name": "theirs"}},
    ("POST", "/v1/operations"): {"kind": "cancel", "filter": {"name": "theirs"}},
    ("POST", "/v1/erasures/preview"): {"key": "absent-key"},
    ("POST", "/v1/erasures"): {"key": "absent-key"},
    ("POST", "/v1/workflow-runs/{name}/start"): {"workflow": "absent", "steps": []},
    ("POST", "/v1/workflows"): {"name": "absent"},
    ("POST", "/v1/streams"): {"name": "theirs-too", "partitions": 1},
    ("POST", "/v1/topics"): {"name": "theirs-too"},
}


# Of what the server has made.
IDS: dict[str, str] = {}


@pytest.fixture(scope="module")
def served(databases: TemporaryDatabases) -> Iterator[Served]:
    """A server with a user of each role, one of some job types, and a secret of others in every place that may hold one."""
    with databases.database() as url:
        asyncio.run(add_users(url))
        with serving(url, token=None, PENSTOCK_HTTP_LONGEST_LIVE="0.2", PENSTOCK_HTTP_LONGEST_WAIT="0.2") as served:
            with served.client(auth=("admin", "admin-password")) as client:
                for name in ("mine", "theirs"):
                    body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
                    made = [
                        client.post("/v1/jobs", json=body),
                        client.post("/v1/pools", json={"name": f"{name}-pool", "slots": 4}),
                        client.post(f"/v1/pools/{name}-pool/jobs", json={"key": name, "data": name}),
                        client.put(f"/v1/pools/{name}-pool/standing/{name}", json={"data": name}),
                        client.post("/v1/streams", json={"name": name, "partitions": 1}),
                        client.post(f"/v1/streams/{name}/events", json={"data": name, "key": name}),
                        client.post("/v1/topics", json={"name": name}),
                        client.put(f"/v1/topics/{name}/subscribers/{name}", json={}),
                        client.post(f"/v1/topics/{name}/messages", json={"data": name}),
                        client.post(f"/v1/workers/worker-of-{name}/heartbeat", json={"names": [name], "dead_after_s": 600}),
                    ]
                    assert [answer.text for answer in made if answer.status_code >= 300] == []
                assert client.put(f"/v1/jobs/theirs/{JOB}", json={"data": "theirs"}).status_code == 202
                started = client.post("/v1/operations", json={"kind": "replay", "filter": {"name": "theirs"}})
                assert started.status_code < 300, started.text
                IDS["operation"] = started.json()["id"]
            yield served


async def add_users(url: str) -> None:
    async with Penstock(url) as app:
        database = await app.database()
        for role in USERS:
            await add_user(database, role, role, hash_secret(f"{role}-password"), None)
        await add_user(database, "narrow", "admin", hash_secret("narrow-password"), ["mine"])
        # One process that works for users who may not know of each other.
        await database.fetch(
            """
            insert into penstock.workers
                (id, host, pid, names, concurrency, metadata, halted, no_key, started_at, seen_at, dead_after, blocked_since,
                blocked_by)
            values (
                'shared', 'h', 1, array['mine'], 1, '{"consumers": ["mine/a", "theirs/a"], "schedules": ["theirs"]}',
                '{"theirs/a": "of theirs"}', '{"theirs": "k"}', now(), now(), '1 day', now(), 'theirs 0190b7a0'
            )
            """
        )


def routes() -> Iterator[tuple[str, str]]:
    """Method and path of every route of the application."""
    for route in http_routes(None).routes:
        for method in getattr(route, "methods", None) or ["SOCKET"]:
            yield method, str(getattr(route, "path_format", route))


def answered(client: httpx.Client, method: str, path: str, names: dict[str, str]) -> httpx.Response:
    """The answer to a call of a route, as that to a request also where it is a WebSocket."""
    filled = path.format_map(names)
    params = PARAMETERS.get((method, path), {})
    if method == "SOCKET":
        request = client.build_request("GET", str(httpx.URL(filled, params=params)))
        if client.auth is not None:
            request = next(client.auth.sync_auth_flow(request))
        headers = {"Authorization": value} if (value := request.headers.get("Authorization")) else {}
        try:
            with connect(str(request.url).replace("http", "ws", 1), additional_headers=headers):
                return httpx.Response(101, content=b"")
        except InvalidStatus as refused:
            return httpx.Response(refused.response.status_code, content=bytes(refused.response.body or b""))
    body = None if method in ("GET", "DELETE") else BODIES.get((method, path), {})
    return client.request(method, filled, json=body, params=params)


def test_every_route_of_the_application_is_in_the_table() -> None:
    assert sorted(TABLE) == sorted(routes())


@pytest.mark.parametrize("user", [None, *USERS])
def test_each_route_answers_the_roles_that_may_and_no_other(served: Served, user: str | None) -> None:
    # Nothing of these names is there: what passes the gate changes nothing.
    absent = dict.fromkeys(("name", "pool", "topic", "key", "group", "member", "client_id", "signal"), "absent") | {
        "file": "start.js"
    }
    wrong = []
    with served.client(auth=None if user is None else (user, f"{user}-password")) as client:
        for (method, path), (needed, _) in TABLE.items():
            answer = answered(client, method, path, {**absent, "id": OPERATION if "operations" in path else JOB})
            if needed == "-" or (user is not None and Role[user.upper()] >= Role[needed.upper()]):
                good = answer.status_code not in (401, 403) and answer.status_code < 500
            elif user is None:
                good = answer.status_code == 401
            else:
                title = f"User {user} has the role {user}; this needs {needed}"
                good = answer.status_code == 403 and answer.json()["title"] == title
            if not good:
                wrong.append((method, path, answer.status_code, answer.text[:200]))
    assert wrong == []


def test_a_user_of_some_job_types_gets_nothing_of_the_others(served: Served) -> None:
    names = dict.fromkeys(("name", "topic", "key", "group", "member", "client_id", "signal"), "theirs") | {"pool": "theirs-pool"}
    expected = {"no": 403, "none": 404, "own": 200}
    wrong = []
    with served.client(auth=("narrow", "narrow-password")) as client:
        for (method, path), (_, theirs) in TABLE.items():
            if theirs == "-":
                continue
            id = IDS["operation"] if "operations" in path else "worker-of-theirs" if "workers" in path else JOB
            answer = answered(client, method, path, {**names, "id": id})
            if answer.status_code != expected[theirs] or (theirs == "own" and "theirs" in answer.text):
                wrong.append((method, path, answer.status_code, answer.text[:200]))
    assert wrong == []


def test_a_pool_that_is_not_there_names_no_pools_of_others(served: Served) -> None:
    names = dict.fromkeys(("id", "key"), "mine") | {"pool": "mine"}
    answers = {}
    with served.client(auth=("narrow", "narrow-password")) as client:
        for method, path in TABLE:
            if "{pool}" in path:
                answers[method, path] = answered(client, method, path, names)
    assert all(answer.status_code in (400, 404) for answer in answers.values())
    assert [route for route, answer in answers.items() if "theirs" in answer.text] == []
    with served.client(auth=("admin", "admin-password")) as client:
        assert "theirs-pool" in client.get("/v1/pools/mine").text


def test_a_worker_that_works_for_others_too_is_nobodys_to_end(served: Served) -> None:
    with served.client(auth=("narrow", "narrow-password")) as client:
        shown = next(one for one in client.get("/v1/workers").json() if one["id"] == "shared")
        assert (shown["names"], shown["consumers"], shown["blocked_by"]) == (["mine"], ["mine/a"], None)
        for method, path in (("POST", "/drain"), ("POST", "/heartbeat"), ("DELETE", "")):
            answer = client.request(method, f"/v1/workers/shared{path}")
            assert (answer.status_code, "theirs" in answer.text) == (403 if path == "/heartbeat" else 404, False), (method, path)
        assert client.post("/v1/workers/worker-of-mine/heartbeat").json()["known"]


@pytest.mark.parametrize("named", [{"after": [JOB]}, {"group": JOB.removeprefix("job_")}])
def test_a_user_of_some_job_types_names_neither_jobs_to_wait_for_nor_job_groups(served: Served, named: dict[str, Any]) -> None:
    with served.client(auth=("narrow", "narrow-password")) as client:
        body = {"data": {}, **named}
        put = client.put(f"/v1/jobs/mine/job_{uuid4()}", json=body)
        assert (put.status_code, "some job types only" in put.text) == (403, True)
        batch = client.post("/v1/jobs/mine/batch", content=json.dumps(body) + "\n" + json.dumps({"data": 1}) + "\n")
        refused, queued = (json.loads(line) for line in batch.text.splitlines()[:2])
        assert ("some job types only" in json.dumps(refused), queued["outcome"]) == (True, "queued")
