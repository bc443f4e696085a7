"""A user of some job types learns nothing of the others: by no id, name, group, filter or position of any route.

Each parameter of each route is tried with what another tenant has, and with what there is not, while all other parameters name
what the user has. The two answers have to be the same but for what the request itself says, and take the same statements. The
routes and parameters come from the application's OpenAPI document, so that one which is not known here fails. The table of what
was tried is written to `route-parameters.txt` in the folder of the test.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import asyncpg
import pytest

from penstock.http.jobs import enqueuing
from penstock.http.server import http_routes
from tests.http.tenants import Tenants, bare, tenants

# What names nothing: payloads, options, numbers of the user's own things, and how much or how long.
PLAIN = {
    "details", "wait", "limit", "force", "order", "running", "open", "data", "payload", "value", "result", "error",
    "status", "retryable", "attempt", "attempts", "priority", "when", "max_attempts", "time_limit_s", "run_after",
    "expires_at", "unique_for_s", "delivery_strategy", "concurrency", "visibility_timeout_s", "backoff_base_s",
    "backoff_cap_s", "backoff_factor", "backoff_jitter", "keep_failed_s", "keep_succeeded_s", "keep_result",
    "max_waiting", "rate_limit", "rate_period_s", "max_crashes", "convert", "assignor", "slots", "on_retry",
    "key_concurrency", "key_max_waiting", "key_rate_limit", "key_rate_period_s", "weight", "wait_s", "kind",
    "rewrite", "skip_unseen", "on_failure", "then_data", "steps", "in_flight", "host", "pid", "state", "dead_after_s",
    "code_version", "for_s", "compact", "compression", "encrypted", "format", "keep_age_s", "keep_bytes",
    "keep_events", "keep_unread", "max_event_bytes", "segment_age_s", "segment_bytes", "segment_events", "partitions",
    "bytes", "headers", "time", "partition", "to", "reason", "offsets", "metadata", "start", "ahead",
    "auto_offset_reset", "busy", "epoch", "revision", "next_offset", "ttl_s", "filter", "drop", "background",
    "timeout", "catch_up", "stay", "ack", "window", "replace", "jobs", "commits", "jobs.attempt", "jobs.outcome",
    "jobs.result", "jobs.error", "jobs.retry_after_s", "filter.since", "filter.until", "sequence",
    "commits.partition", "commits.epoch", "commits.revision", "commits.next_offset",
}  # fmt: skip
# A call under an id of its own, where an id that is in use has to be refused. What is said does not tell for what it is in use.
TAKEN = {
    ("PUT", "/v1/jobs/{name}/{id}", "id"),
    ("POST", "/v1/jobs/{name}/batch", "id"),
    ("POST", "/v1/pools/{pool}/jobs", "id"),
    ("POST", "/v1/jobs/{id}/replay", "new_id"),
    ("POST", "/v1/jobs/{name}/{id}/replay", "new_id"),
    ("POST", "/v1/operations", "id"),
    ("POST", "/v1/topics/{topic}/messages", "id"),
    ("POST", "/v1/workers/{id}/heartbeat", "id"),
}
OPEN = ("/healthz", "/readyz")
EVENTS = 321
LINES = {"content-type": "application/x-ndjson"}


@dataclass(frozen=True)
class Call:
    """One request."""

    path: dict[str, str] = field(default_factory=dict)
    query: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] | None = None


@dataclass(frozen=True)
class Parameter:
    """A parameter of a route: `place` is path, query, header or body."""

    method: str
    path: str
    place: str
    name: str


@dataclass
class World:
    """What there is, of the user (`mine`) and of another tenant (`theirs`), by kind: values that mean the same thing each."""

    asked: Tenants
    mine: dict[str, str] = field(default_factory=dict)
    theirs: dict[str, list[str]] = field(default_factory=dict)

    async def admin(self, method: str, url: str, body: Any = None, **options: Any) -> Any:
        answer, _ = await self.asked.ask("admin", method, url, **({"json": body} if body is not None else {}), **options)
        assert answer.status_code < 300, (method, url, answer.text)
        return answer.json() if "application/json" in answer.headers.get("content-type", "") else answer.text


def new_job() -> str:
    return f"job_{uuid4()}"


def cursor(at: str, id: str) -> str:
    return base64.urlsafe_b64encode(f"{at} {id}".encode()).decode().rstrip("=")


async def build(world: World) -> None:
    """Make the same things for both tenants; the other one has more of them."""
    for who in ("mine", "theirs"):
        admin, pool = world.admin, f"{who}-pool"
        await admin("POST", "/v1/jobs", {"name": who, "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5})
        await admin("POST", "/v1/pools", {"name": pool, "slots": 4})
        await admin("POST", f"/v1/pools/{pool}/jobs", {"key": who, "data": f"secret of {who}"})
        for key in (who, f"{who}-last"):
            await admin("PUT", f"/v1/pools/{pool}/standing/{key}", {"data": f"secret of {who}"})
            await admin("POST", f"/v1/pools/{pool}/keys/{key}/pause")
        await admin("PUT", f"/v1/pools/{pool}/weights/{who}", {"weight": 3})
        await admin("POST", "/v1/streams", {"name": who, "partitions": 1})
        lines = "".join(
            json.dumps({"data": f"secret of {who}", "key": who}) + "\n" for _ in range(EVENTS if who == "theirs" else 3)
        )
        events = f"/v1/streams/{who}/events?producer={who}&sequence=1"
        await admin("POST", events, content=lines, headers=LINES)
        session = str(uuid4())
        group = f"/v1/streams/{who}/groups/{who}"
        await admin("PUT", f"{group}/members/{who}", {"session": session, "dead_after_s": 3600})
        await admin("POST", "/v1/topics", {"name": who})
        await admin("PUT", f"/v1/topics/{who}/subscribers/{who}", {})
        published = [{"data": f"secret of {who}", "id": str(uuid4())} for _ in range(EVENTS if who == "theirs" else 3)]
        await admin("POST", f"/v1/topics/{who}/messages", content="\n".join(map(json.dumps, published)), headers=LINES)
        await admin("POST", f"/v1/workers/worker-of-{who}/heartbeat", {"names": [who], "dead_after_s": 3600})
        opened = await admin("POST", "/v1/workflows", {"name": who})
        steps = [{"name": who, "type": who, "data": f"secret of {who}"}]
        await admin("POST", f"/v1/workflow-runs/run-of-{who}/start", {"workflow": who, "steps": steps})
        jobs = {kind: new_job() for kind in ("queued", "archived", "waiting", "running")}
        running = await admin("PUT", f"/v1/jobs/{who}/{jobs['running']}", {"data": f"secret of {who}", "priority": -100})
        claimed = await admin("POST", f"/v1/jobs/{who}/claim", {"worker": f"worker-of-{who}"})
        assert [job["id"] for job in claimed["jobs"]] == [running["id"]]
        queued = {"data": f"secret of {who}", "key": who, "unique": who}
        made = await admin("PUT", f"/v1/jobs/{who}/{jobs['queued']}", queued)
        await admin("PUT", f"/v1/jobs/{who}/{jobs['archived']}", {"data": f"secret of {who}"})
        await admin("POST", f"/v1/jobs/{who}/{jobs['archived']}/cancel")
        await admin("PUT", f"/v1/jobs/{who}/{jobs['waiting']}", {"data": 1, "after": [jobs["queued"]]})
        await admin("PUT", f"/v1/jobs/{who}/{new_job()}", {"data": f"secret of {who}", "group": opened["id"]})
        await admin("POST", f"/v1/jobs/{who}/{jobs['queued']}/signals/{who}", {"value": f"secret of {who}"})
        operation = await admin("POST", "/v1/operations", {"kind": "replay", "filter": {"name": who, "key": who}})
        followed = await admin("GET", f"/v1/streams/{who}/events/follow?from=earliest")
        found = {
            "job": [jobs["queued"], jobs["archived"], jobs["waiting"], jobs["running"]],
            "operation": [operation["id"]],
            "group": [opened["id"]],
            "worker": [f"worker-of-{who}"],
            "session": [session],
            "message": [message["id"] for message in published[:1]],
            "time": [made["created_at"]],
            "cursor": [cursor(made["created_at"], jobs["queued"].removeprefix("job_"))],
            "lease": [str(claimed["jobs"][0]["lease"])],
            "stream": [f"{followed.partition('id: ')[2].partition('@')[0]}@0:2"],
            "run": [f"run-of-{who}"],
        }
        if who == "theirs":
            world.theirs = found
        else:
            world.mine = {kind: values[0] for kind, values in found.items()} | {"archived": jobs["archived"]}
    await world.admin("POST", "/v1/operations/" + world.mine["operation"] + "/cancel")


def absent(kind: str, world: World) -> str:
    """A value of a kind for which there is nothing: a new id, or a word that is used as often as what the other tenant has."""
    id = str(uuid4())
    return {
        "job": f"job_{id}", "operation": id, "group": id, "session": id, "message": id, "worker": f"worker-{id[:8]}",
        "pool": "absent-pool", "cursor": cursor(world.theirs["time"][0], id), "stream": "987654321@0:2", "lease": "987654321",
        "time": world.theirs["time"][0].replace("Z", "1Z") if "." in world.theirs["time"][0] else "2026-01-01T00:00:00.000001Z",
        "number": str(EVENTS + 1), "place": f"0:{EVENTS + 1}", "status": "expired",
        "position": "theirs-lasu",
    }.get(kind, "absent")  # fmt: skip


def kind_of(parameter: Parameter) -> str | None:
    """What a parameter names; None: nothing. Raises `KeyError` for one that is not known here."""
    path, name = parameter.path, parameter.name
    special = {
        ("/v1/queued-jobs", "workflow"): "group", ("/v1/archived-jobs", "workflow"): "group", ("/v1/queued-jobs", "status"): None,
        ("/v1/archived-jobs", "status"): "status", ("/v1/archived-jobs", "reason"): "word", ("/v1/queued-jobs", "since"): "time",
        ("/v1/archived-jobs", "since"): "time", ("/v1/archived-jobs", "until"): "time", ("/v1/queued-jobs", "until"): "time",
        ("/v1/schedules/{name}/runs", "status"): "status", ("/v1/streams/{name}/events", "offset"): "number",
        ("/v1/streams/{name}/events/follow", "last-event-id"): "stream", ("/v1/streams/{name}/events/follow", "from"): "place",
        ("/v1/topics/{topic}/messages", "id"): "message", ("/v1/workflows", "parent"): "group",
        ("/v1/erasures", "id"): "operation",
        ("/v1/operations", "id"): "operation", ("/v1/erasures/preview", "field"): "word", ("/v1/erasures", "field"): "word",
        ("/v1/erasures/preview", "value"): "word", ("/v1/erasures", "value"): "word",
        ("/v1/workflow-runs/{name}/retry", "id"): "run", ("/v1/workflow-runs/{name}/retry", "from_step"): "word",
        ("/v1/streams/{name}/groups/{group}/members/{member}/failures", "offset"): "number",
    }  # fmt: skip
    if (path, name) in special:
        return special[path, name]
    if name in PLAIN:
        return None
    if name == "id":
        first = path.split("/")[2]
        return {"jobs": "job", "operations": "operation", "workers": "worker"}.get(
            first, "worker" if "workers" in path else "job"
        )
    if name == "name" and path.startswith("/v1/workflow-runs/"):
        return "run"
    if name == "group" and parameter.place == "body":
        return "group"
    if name == "after" and parameter.place == "body":
        return "job"
    if (name == "since" and "topics" in path) or name == "last-event-id":
        return "number"
    return {
        "name": "word", "pool": "pool", "topic": "word", "group": "word", "key": "word", "member": "word", "client_id": "word",
        "signal": "word", "unique": "word", "producer": "word", "worker": "worker", "type": "word", "then": "word",
        "then_key": "word",
        "workflow": "word", "session": "session", "new_id": "job", "cursor": "cursor", "after": "position", "names": "word",
        "id": "job", "wanted": "word", "job": "job", "jobs.id": "job", "jobs.lease": "lease",
        "filter.name": "word", "filter.key": "word",
        "filter.workflow": "group", "filter.status": "status", "filter.reason": "word", "filter.error": "word",
        "filter.signature": "word",
    }[name]  # fmt: skip


def values(world: World, kind: str) -> tuple[str, list[str]]:
    """What the user has of a kind, and what the other tenant has."""
    if kind in world.theirs:
        return world.mine[kind], world.theirs[kind]
    known = {
        "pool": ("mine-pool", ["theirs-pool"]), "number": ("1", [str(EVENTS)]), "place": ("0:1", [f"0:{EVENTS}"]),
        "status": ("cancelled", ["failed"]), "position": ("mine", ["theirs-last"]),
    }  # fmt: skip
    return known.get(kind, ("mine", ["theirs"]))


def parameters() -> Iterator[Parameter]:
    """The parameters of all routes, from the OpenAPI document, and those of the WebSocket, which it does not show."""
    document = http_routes(None).openapi()
    schemas = document["components"]["schemas"]

    def fields_of(schema: Any, prefix: str = "") -> Iterator[str]:
        if "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        for one in schema.get("anyOf", []):
            yield from fields_of(one, prefix)
        for name, inner in schema.get("properties", {}).items():
            yield prefix + name
            if not prefix:
                yield from fields_of(inner.get("items", inner), f"{name}.")

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path in OPEN:
                continue
            for one in operation.get("parameters", []):
                yield Parameter(method.upper(), path, one["in"], one["name"])
            contents = operation.get("requestBody", {}).get("content", {}).values()
            for name in sorted({name for content in contents for name in fields_of(content["schema"])}):
                yield Parameter(method.upper(), path, "body", name)
    for route in http_routes(None).routes:
        if not hasattr(route, "methods"):
            for query in (*route.dependant.path_params, *route.dependant.query_params):  # type: ignore[attr-defined]
                place = "path" if query in route.dependant.path_params else "query"  # type: ignore[attr-defined]
                yield Parameter("SOCKET", route.path_format, place, query.alias)  # type: ignore[attr-defined]


BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("PUT", "/v1/jobs/{name}/{id}"): {"data": 1},
    ("POST", "/v1/jobs/{name}/{id}"): {"status": "succeeded", "attempt": 3},
    ("POST", "/v1/jobs/{name}/batch"): {"data": 1},
    ("POST", "/v1/jobs/{id}/priority"): {"priority": 1},
    ("POST", "/v1/jobs/{name}/{id}/priority"): {"priority": 1},
    ("POST", "/v1/jobs/{name}/claim"): {"worker": "worker-of-mine"},
    ("POST", "/v1/jobs/{name}/extend"): {"jobs": [], "for_s": 300},
    ("POST", "/v1/jobs/{name}/settle"): {"jobs": []},
    ("POST", "/v1/jobs"): {"name": "mine", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5},
    ("POST", "/v2/job-types"): {"name": "mine", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5},
    ("POST", "/jobber/queue"): {"type": "mine", "payload": {}},
    ("POST", "/v1/pools"): {"name": "mine", "slots": 4},
    ("POST", "/v1/pools/{pool}/jobs"): {"key": "mine", "data": 1},
    ("PUT", "/v1/pools/{pool}/weights/{key}"): {"weight": 2},
    ("POST", "/v1/operations/preview"): {"kind": "cancel", "filter": {"name": "mine"}},
    # Nothing has this key, so that the user's own jobs stay.
    ("POST", "/v1/operations"): {"kind": "cancel", "filter": {"name": "mine", "key": "no-key"}},
    ("POST", "/v1/erasures/preview"): {"key": "mine"},
    ("POST", "/v1/erasures"): {"key": "mine"},
    ("POST", "/v1/workflows"): {"name": "mine"},
    ("POST", "/v1/workflow-runs/{name}/start"): {"workflow": "mine", "steps": []},
    ("PUT", "/v1/pools/{pool}/standing"): {"wanted": {}},
    ("POST", "/v1/streams"): {"name": "mine"},
    ("POST", "/v1/streams/{name}/events"): {"data": 1},
    ("POST", "/v1/topics"): {"name": "mine"},
    ("POST", "/v1/streams/{name}/groups/{group}/seek"): {"to": "earliest"},
    ("POST", "/v1/topics/{topic}/messages"): {"data": 1},
}  # fmt: skip
_MEMBER = "/v1/streams/{name}/groups/{group}/members/{member}"
_FAILURE = {"partition": 0, "epoch": 1, "revision": 0, "offset": 1, "error": "x"}


def call_of(world: World, parameter: Parameter, value: str) -> Call:
    """The request of a route with a value for one parameter, and what the user has for the others."""
    method, path = parameter.method, parameter.path
    call = Call(body=None if method in ("GET", "DELETE", "SOCKET") else dict(BODIES.get((method, path), {})))
    for name in [part[1:-1] for part in path.split("/") if part.startswith("{")]:
        kind = kind_of(Parameter(method, path, "path", name)) or "word"
        call.path[name] = values(world, kind)[0]
    if path.endswith("/replay"):
        call.path["id"], call.query["force"] = world.mine["archived"], "true"
    if path.startswith(_MEMBER):
        if method == "DELETE":
            call.query["session"] = str(uuid4())
        elif call.body is not None:
            body = {"session": world.mine["session"]}
            call.body.update({"commit": {"commits": []}, "failures": _FAILURE}.get(path.rpartition("/")[2], body))
    if path == "/v1/streams/{name}/events" and method == "POST" and parameter.name == "producer":
        call.query["sequence"] = "1"
    if (method, path) == ("PUT", "/v1/jobs/{name}/{id}"):
        call.path["id"] = new_job()
    if path.endswith("/deliveries"):
        call.query["client_id"] = "mine"
    place = parameter.name.partition(".")
    if parameter.place == "path":
        call.path[parameter.name] = value
    elif parameter.place == "query":
        call.query[parameter.name] = value
    elif parameter.place == "header":
        call.headers[parameter.name] = value
    elif parameter.place == "body" and call.body is not None:
        if place[0] == "filter":
            call.body["filter"] = call.body["filter"] | {place[2]: value}
        elif place[0] == "jobs":
            one: dict[str, Any] = {"id": world.mine["job"], "attempt": 1, "lease": 1}
            one |= {place[2]: int(value) if place[2] == "lease" else value}
            call.body["jobs"] = [one | ({"outcome": "succeeded"} if path.endswith("/settle") else {})]
        elif parameter.name in ("after", "names"):
            call.body[parameter.name] = [value]
        elif parameter.name == "wanted":
            call.body["wanted"] = {"mine": 1, "theirs": 1, "absent": 1, value: 1}
        elif parameter.name in ("since", "offset"):
            call.body[parameter.name] = int(value)
        else:
            call.body[parameter.name] = value.removeprefix("job_") if parameter.name in ("job", "parent") else value
    return call


async def asked(world: World, parameter: Parameter, call: Call, said: str) -> tuple[tuple[int, str, str], list[str]]:
    """What the user of some job types is answered, and the statements that it took."""
    url = parameter.path.format_map({name: quote(value, safe="") for name, value in call.path.items()})
    options: dict[str, Any] = {"params": call.query} | ({} if parameter.method == "SOCKET" else {"headers": call.headers})
    if call.body is not None and parameter.path.endswith("/batch"):
        options["content"] = json.dumps(call.body)
    elif call.body is not None:
        options["json"] = call.body
    answer, statements = await world.asked.ask("narrow", parameter.method, url, **options)
    assert answer.status_code < 500, (parameter, answer.text)
    assert "secret of theirs" not in answer.text, (parameter, answer.text)
    return bare(answer, said), statements


@pytest.fixture
async def world(url: str) -> AsyncIterator[World]:
    async with tenants(url) as application:
        world = World(application)
        await build(world)
        yield world


def test_every_parameter_of_every_route_is_known() -> None:
    unknown = []
    for parameter in parameters():
        try:
            kind_of(parameter)
        except KeyError:
            unknown.append(parameter)
    assert unknown == []


async def test_no_parameter_of_any_route_tells_of_another_tenant(world: World, tmp_path: Path) -> None:
    table: list[str] = []
    wrong: list[Any] = []
    # What is appended with the words that are tried is read by other routes.
    for parameter in sorted(parameters(), key=lambda one: one.path.endswith(("/events", "/messages"))):
        kind = kind_of(parameter)
        row = f"{parameter.method:7}{parameter.path:66}{parameter.place:8}{parameter.name:18}"
        if kind is None:
            table.append(f"{row}names nothing")
            continue
        taken = (parameter.method, parameter.path, parameter.name) in TAKEN
        differs: Any = None
        found = ()
        # The server's own readings are repeated at times, and some are kept: what is a difference is one each time.
        for _ in range(3):
            differs, found = await _difference(world, parameter, kind, taken)
            if differs is None:
                break
        if differs is not None:
            wrong.append((parameter, differs))
        table.append(
            f"{row}{kind:10}{'refused as in use' if taken else 'no difference' if differs is None else 'DIFFERS'} {found}"
        )
    (tmp_path / "route-parameters.txt").write_text("\n".join(table) + "\n")
    print("\n".join(table))
    assert not wrong, "\n".join(f"{parameter}\n  {first}\n  {other}" for parameter, (first, other) in wrong)


async def _difference(world: World, parameter: Parameter, kind: str, taken: bool) -> tuple[Any, Any]:
    """How the answers for what others have and for what there is not differ; None: they do not."""
    _, theirs = values(world, kind)
    nothing = absent(kind, world)
    answers = [await asked(world, parameter, call_of(world, parameter, value), value) for value in theirs]
    if taken:
        # Where the thing of the other tenant is, and in which state, is not told either.
        for (status, _, text), _ in answers:
            if status not in (200, 400, 403, 409) or (status == 200 and '"error"' not in text):
                return answers[:2], status
        first = answers[0]
    else:
        first = await asked(world, parameter, call_of(world, parameter, nothing), nothing)
    different = [(first, other) for other in answers if other != first]
    return (different[0] if different else None), first[0][0]


def test_one_module_of_the_http_api_enqueues() -> None:
    """It asks for the user (`New`), so that a further route cannot enqueue without the checks of what the user may name."""
    folder = Path(enqueuing.__file__).parents[1]
    calls = re.compile(r"\b(put_jobs|enqueue_many|enqueue_arguments|start_many)\(|penstock\.enqueue")
    of_dashboard = folder / "dashboard/pages/types.py"  # names no id, no job to wait for and no group
    found = {path for path in folder.rglob("*.py") if calls.search(path.read_text())}
    assert found == {Path(enqueuing.__file__), of_dashboard}


async def test_a_user_of_some_job_types_claims_in_the_name_of_no_worker_of_others(world: World, url: str) -> None:
    async def claimed(worker: str) -> None:
        await world.asked.ask("narrow", "PUT", f"/v1/jobs/mine/{new_job()}", json={"data": 1})
        answer, _ = await world.asked.ask("narrow", "POST", "/v1/jobs/mine/claim", json={"worker": worker})
        assert len(answer.json()["jobs"]) == 1

    await claimed("worker-of-theirs")
    await claimed("worker-of-mine")
    connection = await asyncpg.connect(url)
    workers = await connection.fetch("select worker from penstock.leases where name = 'mine'")
    await connection.close()
    assert {row["worker"] for row in workers if not row["worker"].startswith("user.")} == {"worker-of-mine"}
    beat = await world.admin("POST", "/v1/workers/worker-of-theirs/heartbeat")
    assert len(beat["leases"]) == 1, "the lease of its own job alone"


async def test_a_list_of_operations_is_as_long_whatever_others_start(world: World) -> None:
    mine, _ = await world.asked.ask("narrow", "GET", "/v1/operations", params={"limit": 1})
    assert [one["filter"]["name"] for one in mine.json()] == ["mine"]


async def test_a_job_names_none_of_those_for_which_it_waits_to_a_user_of_some_types(world: World) -> None:
    waiting = new_job()
    await world.admin("PUT", f"/v1/jobs/mine/{waiting}", {"data": 1, "after": world.theirs["job"][:1]})
    seen, _ = await world.asked.ask("narrow", "GET", f"/v1/jobs/{waiting}", params={"details": "true"})
    assert (seen.json()["after"], seen.json()["status"], seen.json()["workflow"]) == ([], "waiting", None)
    assert world.theirs["job"][0] not in seen.text
