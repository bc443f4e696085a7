"""Streams over HTTP: create, append, read, follow."""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from penstock.streams.partitioner import partition_of
from penstock.testing import TemporaryDatabases
from tests.activity import seen_now
from tests.command_line import penstock
from tests.http.http_server import Served, serving
from tests.http.live_calls import follow
from tests.http.stream_requests import append, append_lines, create, outcomes
from tests.waiting import eventually

AT = partition_of("N14228", 16)


@pytest.fixture
def stream(client: httpx.Client) -> str:
    return create(client)


def read(client: httpx.Client, stream: str, **params: Any) -> dict[str, Any]:
    answer = client.get(f"/v1/streams/{stream}/events", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_stream_is_created_and_shown(client: httpx.Client) -> None:
    name = create(client, 4, keep_age_s=3600, max_event_bytes=1000)
    assert client.post("/v1/streams", json={"name": name}).json()["id"] == "conflict"
    shown = client.get(f"/v1/streams/{name}").json()
    assert (shown["partitions"], shown["keep_age_s"], shown["max_event_bytes"]) == (4, 3600, 1000)
    assert shown["ends"] == [{"partition": at, "first": 0, "next": 0} for at in range(4)]
    append(client, name, 1, key="a")
    shown = client.get(f"/v1/streams/{name}").json()
    assert sum(end["next"] for end in shown["ends"]) == shown["events"] == 1
    assert name in {one["name"] for one in client.get("/v1/streams").json()}


def test_a_stream_is_changed_and_grows(client: httpx.Client) -> None:
    name = create(client, 4, keep_age_s=3600, segment_events=10)
    path = f"/v1/streams/{name}"
    changed = client.patch(path, json={"keep_age_s": None, "keep_events": 500, "partitions": 8})
    assert changed.status_code == 200, changed.text
    shown = client.get(path).json()
    assert changed.json().items() <= shown.items()
    assert (shown["keep_age_s"], shown["keep_events"], shown["segment_events"], shown["partitions"]) == (None, 500, 10, 8)
    assert len(shown["ends"]) == 8
    for body in ({"partitions": 4, "keep_events": 9}, {"keep_events": 0}, {"format": "bytes"}, {"keep": 1}):
        refused = client.patch(path, json=body)
        assert (refused.status_code, refused.json()["id"]) == (400, "invalid_parameter"), refused.text
    # All or nothing.
    assert client.get(path).json()["keep_events"] == 500
    assert client.patch("/v1/streams/nowhere", json={}).status_code == 404


def test_a_growth_that_waits_for_a_paused_partition_is_shown(client: httpx.Client) -> None:
    name = create(client)
    append(client, name, 1)
    groups = f"/v1/streams/{name}/groups"
    client.put(f"{groups}/g/members/m", json={})
    client.post(f"{groups}/g/pause", json={"partitions": [0], "reason": "lunch"})
    client.patch(f"/v1/streams/{name}", json={"partitions": 3})
    held = {"group": "g", "partition": 0, "pause_reason": "lunch", "quarantined": False, "holds": [1, 2]}
    assert client.get(f"/v1/streams/{name}").json()["held_back"] == [held]
    assert [at["waits_for"] for at in client.get(f"{groups}/g").json()["partitions"]] == [[], [0], [0]]
    client.post(f"{groups}/g/seek", json={"offsets": {"0": 1}})
    assert client.get(f"/v1/streams/{name}").json()["held_back"] == []


def test_a_dropped_stream_is_gone_for_all(client: httpx.Client, stream: str) -> None:
    path = f"/v1/streams/{stream}"
    append(client, stream, 1)
    session = client.put(f"{path}/groups/g/members/m", json={}).json()["session"]
    refused = client.delete(path)
    assert (refused.status_code, refused.json()["id"]) == (409, "conflict"), refused.text
    with follow(client, f"{path}/events/follow", **{"from": "earliest"}) as events:
        assert events.data(1) == [1]
        polled: list[httpx.Response] = []
        poll = threading.Thread(
            target=lambda: polled.append(client.get(f"{path}/events", params={"offset": 1, "wait": "20s"}, timeout=30))
        )
        poll.start()
        assert client.delete(path, params={"force": "true"}).status_code == 204
        (end,) = events.rest()
        assert (end.event, end.json()["id"]) == ("failed", "not_found")
        poll.join(30)
        assert [answer.status_code for answer in polled] == [404]
    for answer in (
        client.post(f"{path}/groups/g/members/m/read", json={"session": session}),
        client.post(f"{path}/events", json={"data": 1}),
        client.get(path),
        client.delete(path),
    ):
        assert (answer.status_code, answer.json()["id"]) == (404, "not_found")


def test_a_stream_that_is_created_again_is_not_followed_from_the_middle(client: httpx.Client, stream: str) -> None:
    path = f"/v1/streams/{stream}"
    new = {"name": stream, "partitions": client.get(path).json()["partitions"]}
    for n in range(3):
        append(client, stream, n)
    with follow(client, f"{path}/events/follow", **{"from": "earliest"}) as events:
        seen = events.take(3)
        assert client.delete(path, params={"force": "true"}).status_code == 204
        assert client.post("/v1/streams", json=new).status_code == 201
        for n in range(100, 109):
            append(client, stream, n)
        (end,) = events.rest()
        assert (end.event, end.json()["id"]) == ("failed", "not_found")
    # Who comes back with the position in the old one is told, and who starts again gets all of the new one.
    back = client.get(f"{path}/events/follow", headers={"Last-Event-ID": seen[-1].id})
    assert (back.status_code, back.json()["id"]) == (410, "offset_gone")
    assert "dropped and created again" in back.text
    with follow(client, f"{path}/events/follow", **{"from": "earliest"}) as events:
        assert events.data(9) == list(range(100, 109))


def test_an_event_keeps_all_that_it_was_given(client: httpx.Client, stream: str) -> None:
    number = "12345678901234567890.123456789012345678"
    body = f'{{"data": {{"n": {number}}}, "key": "acme", "headers": {{"a": [1]}}, "time": "2026-01-31T12:00:00+02:00"}}'
    answer = client.post(f"/v1/streams/{stream}/events", content=body, headers={"Content-Type": "application/json"})
    assert answer.json() == {"appended": 1, "partition": 0, "offset": 0, "sequence": None, "duplicate": False}
    text = client.get(f"/v1/streams/{stream}/events").text
    assert number in text
    (event,) = json.loads(text)["events"]
    assert (event["key"], event["headers"], event["time"]) == ("acme", {"a": [1]}, "2026-01-31T10:00:00Z")
    assert event["appended_at"]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_bytes_travel_as_base64(client: httpx.Client, compression: str | None) -> None:
    name = create(client, format="bytes", compression=compression)
    blob = bytes(range(256)) * 10
    encoded = base64.b64encode(blob).decode()
    assert client.post(f"/v1/streams/{name}/events", json={"bytes": encoded}).status_code == 201
    assert [event["bytes"] for event in read(client, name)["events"]] == [encoded]


def test_many_events_are_appended_in_the_order_of_their_lines(client: httpx.Client, stream: str) -> None:
    events = [{"data": n, "key": f"k{n % 7}"} for n in range(2_500)]
    told = outcomes(append_lines(client, stream, events))
    assert [(one["line"], one["outcome"], one["offset"]) for one in told] == [(n + 1, "appended", n) for n in range(2_500)]
    found: list[Any] = []
    offset = 0
    while page := (answer := read(client, stream, offset=offset, limit=999))["events"]:
        found += [event["data"] for event in page]
        offset = answer["next_offset"]
    assert found == list(range(2_500))


def test_keys_go_where_sql_and_python_send_them(client: httpx.Client) -> None:
    name = create(client, 16)
    assert append(client, name, 1, key="N14228")["partition"] == AT
    append_lines(client, name, [{"data": 2, "key": "N14228"}, {"data": 3, "key": "N14228"}])
    assert [event["data"] for event in read(client, name, partition=AT)["events"]] == [1, 2, 3]


def test_a_producers_repeated_batch_is_there_once(client: httpx.Client, stream: str) -> None:
    first = outcomes(append_lines(client, stream, [{"data": n} for n in range(1_500)], producer="p", sequence=1))
    assert (len(first), first[0]["sequence"], first[-1]["sequence"]) == (1_500, 1, 2)
    again = outcomes(append_lines(client, stream, [{"data": n} for n in range(1_500)], producer="p", sequence=1))
    assert (again[0]["outcome"], again[-1]["sequence"]) == ("duplicate", 2)
    assert again[1_000:] == first[1_000:]
    assert append(client, stream, 1_500)["offset"] == 1_500
    one = client.post(f"/v1/streams/{stream}/events", params={"producer": "p", "sequence": 3}, json={"data": "x"})
    repeated = client.post(f"/v1/streams/{stream}/events", params={"producer": "p", "sequence": 3}, json={"data": "x"})
    assert one.json() == repeated.json()
    assert one.json()["offset"] == 1_501
    old = client.post(f"/v1/streams/{stream}/events", params={"producer": "p", "sequence": 1}, json={"data": "x"}).json()
    assert (old["appended"], old["duplicate"]) == (0, True)
    missing = client.post(f"/v1/streams/{stream}/events", params={"producer": "p", "sequence": 9}, json={"data": "x"})
    assert (missing.status_code, missing.json()["id"]) == (409, "conflict")
    assert client.get(f"/v1/streams/{stream}").json()["events"] == 1_502


def test_a_bad_line_does_not_stop_the_others(client: httpx.Client, stream: str) -> None:
    events: list[Any] = [{"data": n} for n in range(1_200)]
    told = outcomes(append_lines(client, stream, [*events, {"dat": 1}, {"data": 1}]))
    assert [one["line"] for one in told if "error" in one] == [1_201]
    assert (told[-1]["line"], told[-1]["offset"]) == (1_202, 1_200)
    assert client.get(f"/v1/streams/{stream}").json()["events"] == 1_201


@pytest.mark.parametrize("numbered", [False, True])
def test_an_event_that_the_database_refuses_is_alone_or_takes_its_numbered_part(client: httpx.Client, numbered: bool) -> None:
    stream = create(client, max_event_bytes=1_000)
    events: list[Any] = [{"data": n} for n in range(1_500)]
    events[1_200]["data"] = "x" * 2_000
    params = {"producer": "p", "sequence": 1} if numbered else {}
    told = outcomes(append_lines(client, stream, [*events, *events[:1_000]], **params))
    refused = [one["line"] for one in told if "error" in one and "line" in one]
    assert refused == ([*range(1_001, 2_001)] if numbered else [1_201])
    # The number of the part that was refused is not given to the next one.
    there = 1_000 if numbered else 2_499
    assert client.get(f"/v1/streams/{stream}").json()["events"] == there
    if numbered:
        assert [one["lines"] for one in told if "lines" in one] == [[[2_001, 2_500]]]
        again = outcomes(append_lines(client, stream, events[:1_000], **params))
        assert {one["outcome"] for one in again} == {"appended"}
        assert client.get(f"/v1/streams/{stream}").json()["events"] == there


def test_memory_does_not_grow_with_the_body(served: Served, client: httpx.Client, stream: str) -> None:
    import psutil

    server = psutil.Process(served.process.pid)
    line = json.dumps({"data": "x" * 1_000}).encode() + b"\n"

    def body(lines: int) -> Iterator[bytes]:
        for _ in range(lines // 100):
            yield line * 100

    headers = {"Content-Type": "application/x-ndjson"}
    client.post(f"/v1/streams/{stream}/events", content=body(5_000), headers=headers)
    before = server.memory_info().rss
    answer = client.post(f"/v1/streams/{stream}/events", content=body(40_000), headers=headers)
    assert sum(one["outcome"] == "appended" for one in outcomes(answer)) == 40_000
    # Forty megabytes came in.
    assert server.memory_info().rss - before < 20_000_000


@pytest.mark.parametrize(
    ("status", "id", "method", "path", "body"),
    [
        (400, "invalid_parameter", "POST", "/v1/streams", {"name": "a b"}),
        (400, "invalid_parameter", "POST", "/v1/streams", {"name": "x", "partitions": 0}),
        (400, "invalid_parameter", "POST", "/v1/streams", {"name": "x", "format": "xml"}),
        (400, "invalid_parameter", "POST", "/v1/streams", {"name": "x", "compression": "zstd"}),
        (400, "invalid_parameter", "POST", "/v1/streams", {"name": "x", "unknown": 1}),
        (404, "not_found", "GET", "/v1/streams/none", None),
        (404, "not_found", "GET", "/v1/streams/none/events", None),
        (404, "not_found", "GET", "/v1/streams/none/events/follow", None),
        (404, "not_found", "POST", "/v1/streams/none/events", {"data": 1}),
        (404, "not_found", "GET", "/v1/streams/{stream}/events?partition=7", None),
        (400, "invalid_parameter", "GET", "/v1/streams/{stream}/events?offset=-1", None),
        (400, "invalid_parameter", "GET", "/v1/streams/{stream}/events?limit=0", None),
        (400, "invalid_parameter", "GET", "/v1/streams/{stream}/events?wait=soon", None),
        (400, "invalid_parameter", "GET", "/v1/streams/{stream}/events/follow?from=never", None),
        (400, "invalid_parameter", "GET", "/v1/streams/{stream}/events/follow?from=0:5", None),
        (400, "invalid_parameter", "GET", "/v1/streams/{stream}/events/follow?from=9:0", None),
        (400, "invalid_parameter", "GET", "/v1/streams/{stream}/events/follow?partition=9", None),
        (400, "invalid_parameter", "GET", "/v1/streams/{stream}/events/follow?from=2026-01-31T12:00:00", None),
        (400, "invalid_parameter", "POST", "/v1/streams/{stream}/events", {}),
        (400, "invalid_request", "POST", "/v1/streams/{stream}/events", {"dta": 1}),
        (400, "invalid_request", "POST", "/v1/streams/{stream}/events", [1]),
        (400, "invalid_parameter", "POST", "/v1/streams/{stream}/events", {"bytes": "aGVsbG8="}),
        (400, "invalid_parameter", "POST", "/v1/streams/{stream}/events", {"data": "\u0000"}),
        (400, "invalid_parameter", "POST", "/v1/streams/{stream}/events", {"data": 1, "key": "\u0000"}),
        (400, "invalid_parameter", "POST", "/v1/streams/{stream}/events", {"data": 1, "headers": [1]}),
        (400, "invalid_parameter", "POST", "/v1/streams/{stream}/events", {"data": 1, "time": "2026-01-31T12:00:00"}),
        (400, "invalid_parameter", "POST", "/v1/streams/{stream}/events?producer=p", {"data": 1}),
        (413, "entity_too_large", "POST", "/v1/streams/{small}/events", {"data": "x" * 2_000}),
        (413, "entity_too_large", "POST", "/v1/streams/{stream}/events", {"data": "x" * 2_000_000}),
    ],
)
def test_a_bad_call_is_refused(
    client: httpx.Client, stream: str, status: int, id: str, method: str, path: str, body: Any
) -> None:
    path = path.replace("{stream}", stream)
    if "{small}" in path:
        path = path.replace("{small}", create(client, max_event_bytes=1_000))
    answer = client.request(method, path, json=body) if body is not None else client.request(method, path)
    assert (answer.status_code, answer.json()["id"]) == (status, id), answer.text
    assert answer.json()["title"]


def test_a_long_poll_gets_the_event_that_comes(client: httpx.Client, stream: str) -> None:
    found: list[Any] = []
    polls = [
        threading.Thread(target=lambda: found.append(read(client, stream, wait="250s")["events"][0]["data"])) for _ in range(5)
    ]
    for poll in polls:
        poll.start()
    append(client, stream, "it")
    for poll in polls:
        poll.join(25)
    assert found == ["it"] * 5


def test_a_long_poll_ends_empty(client: httpx.Client, stream: str) -> None:
    started = time.monotonic()
    assert read(client, stream, wait="300ms") == {"partition": 0, "next_offset": 0, "events": []}
    assert time.monotonic() - started >= 0.3


async def test_followers_cost_the_database_nothing_each(url: str, sql: Any) -> None:
    database = await sql.fetchval("select current_database()")
    await sql.execute(f"alter database \"{database}\" set track_functions = 'all'")
    with serving(url) as served, served.client() as client, ExitStack() as followed:
        name = create(client)
        path = f"/v1/streams/{name}/events/follow"
        everyone = [followed.enter_context(follow(followed.enter_context(served.client()), path)) for _ in range(20)]
        for n in range(3):
            append(client, name, n)
            assert [one.data(1) for one in everyone] == [[n]] * 20
    # A session that has ended has written its statistics, and ends somewhat after its client.
    others = (
        "select count(*) = 0 from pg_stat_activity"
        " where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()"
    )
    await eventually(lambda: seen_now(sql, others), "the end of the server's sessions")
    reads = await sql.fetchval("select sum(calls) from pg_stat_user_functions where funcname = 'read_chunks'")
    assert 3 <= reads < 60


def test_a_follower_goes_on_where_it_was_cut(served: Served, client: httpx.Client) -> None:
    """Cut again and again at random while others append; nothing is missing, doubled, or out of order within its partition."""
    name = create(client, 5)
    total = 3_000
    last: str | None = ",".join(f"{at}:0" for at in range(5))
    seen: dict[int, list[int]] = {at: [] for at in range(5)}

    def produce() -> None:
        with served.client() as producer:
            for begin in range(0, total, 50):
                append_lines(producer, name, [{"data": n, "key": str(n)} for n in range(begin, begin + 50)])

    producing = threading.Thread(target=produce)
    producing.start()
    cuts = random.Random(7)
    while (left := total - sum(map(len, seen.values()))) > 0:
        with served.client() as one, follow(one, f"/v1/streams/{name}/events/follow", last) as events:
            for event in events.take(min(left, cuts.randrange(1, 200))):
                found = event.json()
                seen[found["partition"]].append(found["offset"])
                last = event.id
    producing.join()
    assert all(offsets == list(range(len(offsets))) for offsets in seen.values())
    assert sum(map(len, seen.values())) == total


def test_a_follower_sees_only_what_it_wants(client: httpx.Client) -> None:
    name = create(client, 16)
    append(client, name, 1, key="N14228")
    with follow(client, f"/v1/streams/{name}/events/follow", **{"from": "earliest", "partition": AT}) as events:
        assert events.next().id.partition("@")[2] == f"{AT}:1"
    with follow(client, f"/v1/streams/{name}/events/follow") as latest:
        append(client, name, 2, key="N14228")
        assert latest.data(1) == [2]
    with follow(client, f"/v1/streams/{name}/events/follow", **{"from": "2020-01-01T00:00:00Z", "partition": AT}) as events:
        assert events.data(2) == [1, 2]


async def test_a_follower_sees_partitions_that_come_later(client: httpx.Client, served: Served) -> None:
    import asyncpg

    name = create(client, 1)
    with follow(client, f"/v1/streams/{name}/events/follow") as events:
        sql = await asyncpg.connect(served.database_url)
        await sql.execute("select penstock.grow_stream($1, 64)", name)
        await sql.close()
        append_lines(client, name, [{"data": n, "key": str(n)} for n in range(100)])
        assert sorted(events.data(100)) == list(range(100))


async def test_followers_outlive_the_database(url: str, sql: Any) -> None:
    with serving(url) as served, served.client() as client, served.client() as other:
        name = create(client)
        client.post("/v1/topics", json={"name": name})
        streamed, delivered = f"/v1/streams/{name}/events/follow", f"/v1/topics/{name}/deliveries"
        with follow(client, streamed, **{"from": "earliest"}) as events, follow(other, delivered) as messages:
            messages.next()
            database = await sql.fetchval("select current_database()")
            for n in range(5):
                await sql.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1 and pid <> pg_backend_pid()",
                    database,
                )
                await sql.fetchval("select penstock.append($1, $2)", name, str(n))
                await sql.fetchval("select penstock.publish_json($1, $2)", name, f'{{"data": {n}}}')
                assert events.data(1) == [n]
                assert messages.data(1) == [n]


def test_a_quiet_connection_shows_that_it_lives_and_ends_some_day(url: str) -> None:
    with (
        serving(url, PENSTOCK_HTTP_LIVE_KEEP_ALIVE="0.05", PENSTOCK_HTTP_LONGEST_LIVE="0.5") as served,
        served.client() as client,
    ):
        name = create(client)
        text = client.get(f"/v1/streams/{name}/events/follow").text
        assert text.count(": keep-alive") > 2
        assert text.endswith('event: end\ndata: {"title":"the connection is as old as it may get"}\n\n')


def test_there_are_no_more_connections_than_allowed(url: str) -> None:
    with serving(url, PENSTOCK_HTTP_MAX_LIVE="1") as served, served.client() as client:
        path = f"/v1/streams/{create(client)}/events/follow"
        with follow(client, path):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["id"]) == (503, "service_unavailable")


async def test_what_retention_dropped_is_gone(client: httpx.Client, served: Served) -> None:
    import asyncpg

    name = create(client, keep_events=1)
    append(client, name, 1)
    sql = await asyncpg.connect(served.database_url)
    await sql.execute("select penstock.roll_segment($1)", name)
    append(client, name, 2)
    await sql.execute("select penstock.retire_segments($1)", name)
    await sql.close()
    for path in ("events", "events/follow?from=0:0"):
        answer = client.get(f"/v1/streams/{name}/{path}")
        assert (answer.status_code, answer.json()["id"]) == (410, "offset_gone"), answer.text
        assert "first that is there is 1" in answer.json()["detail"]
    back = client.get(f"/v1/streams/{name}/events/follow", headers={"Last-Event-ID": "0:0"})
    assert back.status_code == 410


def test_a_server_that_is_told_to_stop_ends_its_followers(databases: TemporaryDatabases) -> None:
    with databases.database() as url:
        with (
            serving(url) as served,
            served.client() as client,
            follow(client, f"/v1/streams/{create(client)}/events/follow") as events,
        ):
            polled: list[int] = []
            stream = client.get("/v1/streams").json()[0]["name"]
            poll = threading.Thread(target=lambda: polled.append(client.get(f"/v1/streams/{stream}/events?wait=60s").status_code))
            poll.start()
            append(client, stream, 1)
            assert events.data(1) == [1]
            poll.join(20)
            served.process.terminate()
            assert [event.event for event in events.rest()] == ["end"]
        assert polled == [200]


def test_roles_and_names_hold(url: str) -> None:
    for name, role, types in (
        ("reads", "read", []),
        ("adds", "enqueue", []),
        ("works", "work", []),
        ("other", "admin", ["-t", "else"]),
    ):
        added = penstock(url, "users", "add", name, "--role", role, *types, PENSTOCK_USER_PASSWORD="pw-of-the-tests")
        assert added.returncode == 0, added.stderr
    with serving(url) as served, served.client() as admin:
        stream = create(admin)
        admin.post("/v1/topics", json={"name": stream})
        for user, method, path, body, status in (
            ("reads", "GET", f"/v1/streams/{stream}/events", None, 200),
            ("reads", "POST", f"/v1/streams/{stream}/events", {"data": 1}, 403),
            ("adds", "POST", f"/v1/streams/{stream}/events", {"data": 1}, 201),
            ("adds", "POST", "/v1/streams", {"name": "x"}, 403),
            ("works", "PATCH", f"/v1/streams/{stream}", {"keep_events": 1}, 403),
            ("other", "PATCH", f"/v1/streams/{stream}", {"keep_events": 1}, 403),
            ("works", "DELETE", f"/v1/streams/{stream}", None, 403),
            ("other", "DELETE", f"/v1/streams/{stream}", None, 403),
            ("adds", "PUT", f"/v1/streams/{stream}/groups/g/members/m", {}, 403),
            ("works", "PUT", f"/v1/streams/{stream}/groups/g/members/m", {}, 200),
            ("works", "POST", f"/v1/streams/{stream}/groups/g/seek", {"to": "latest"}, 403),
            ("other", "GET", f"/v1/streams/{stream}/events", None, 403),
            ("other", "GET", f"/v1/streams/{stream}/events/follow", None, 403),
            ("other", "GET", f"/v1/streams/{stream}/groups", None, 403),
            ("other", "POST", "/v1/streams", {"name": "mine"}, 403),
            ("other", "POST", "/v1/streams", {"name": "else"}, 201),
            ("reads", "POST", f"/v1/topics/{stream}/messages", {"data": 1}, 403),
            ("adds", "POST", f"/v1/topics/{stream}/messages", {"data": 1}, 202),
            ("adds", "PUT", f"/v1/topics/{stream}/subscribers/c", {}, 403),
            ("adds", "GET", f"/v1/topics/{stream}/deliveries", None, 403),
            ("works", "PUT", f"/v1/topics/{stream}/subscribers/c", {}, 200),
            ("works", "POST", "/v1/topics", {"name": "x"}, 403),
            ("other", "GET", f"/v1/topics/{stream}", None, 403),
            ("other", "GET", f"/v1/topics/{stream}/deliveries", None, 403),
        ):
            answer = admin.request(method, path, json=body, auth=(user, "pw-of-the-tests"))
            assert answer.status_code == status, (user, method, path, answer.text)
        assert [one["name"] for one in admin.get("/v1/streams", auth=("other", "pw-of-the-tests")).json()] == ["else"]
        assert admin.get("/v1/topics", auth=("other", "pw-of-the-tests")).json() == []
