"""Receiving topics over HTTP: Server-Sent Events and WebSockets."""

from __future__ import annotations

import json
import random
import secrets
import threading
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from penstock import Penstock
from penstock.jobs import rates
from penstock.testing import TemporaryDatabases
from tests.http.http_calls import claim
from tests.http.http_server import TOKEN, Served, serving
from tests.http.live_calls import AUTHORIZATION, follow, frame, socket, subprotocol
from tests.http.topic_calls import declare, publish, subscribe
from tests.waiting import eventually


@pytest.fixture
def topic(client: httpx.Client) -> str:
    return declare(client)


def subscribers(client: httpx.Client, topic: str) -> list[str]:
    return [one["client_id"] for one in client.get(f"/v1/topics/{topic}/subscribers").json()]


async def test_a_connection_is_a_subscriber(client: httpx.Client, topic: str) -> None:
    with follow(client, f"/v1/topics/{topic}/deliveries", filter=json.dumps({"dest": "JFK"})) as events:
        begun = events.next()
        assert begun.event == "subscribed"
        assert subscribers(client, topic) == [begun.json()["client_id"]]
        publish(client, topic, {"dest": "SFO"})
        receipt = publish(client, topic, {"dest": "JFK"}, background=False, timeout="20s")
        event = events.next()
        assert (event.id, event.json()["seq"], event.json()["id"], event.json()["data"]) == (
            "2",
            2,
            receipt["id"],
            {"dest": "JFK"},
        )
        # The publisher waited until it was handed out.
        assert [outcome["status"] for outcome in receipt["outcomes"]] == ["succeeded"]
    await eventually(lambda: subscribers(client, topic) == [], "the end of the subscription")
    assert publish(client, topic, 1)["receivers"] == 0


async def test_the_queue_goes_with_the_connection(client: httpx.Client, topic: str) -> None:
    with follow(client, f"/v1/topics/{topic}/deliveries") as events:
        queue = events.next().json()["queue"]
        assert client.get(f"/v1/jobs/{queue}").status_code == 200
    await eventually(lambda: client.get(f"/v1/jobs/{queue}").status_code == 404, "the removal of the queue", timeout=60)


def test_messages_come_in_order_each_once(client: httpx.Client, topic: str) -> None:
    with follow(client, f"/v1/topics/{topic}/deliveries") as events:
        events.next()
        for n in range(300):
            publish(client, topic, n)
        assert events.data(300) == list(range(300))


@pytest.mark.parametrize("ack", ["client", "auto", None])
async def test_large_messages_come_in_order_in_parts(served: Served, client: httpx.Client, topic: str, ack: str | None) -> None:
    """More than may wait for one connection, whose client reads when all are published, and acknowledges at the end."""
    path = f"/v1/topics/{topic}/deliveries"
    sent = [f"{n:02}".ljust(200_000, "x") for n in range(40)]
    if ack is None:
        with follow(client, path) as events:
            events.next()
            with served.client() as publisher:
                for text in sent:
                    publish(publisher, topic, text)
            assert events.data(40) == sent
        return
    with socket(served, f"{path}?ack={ack}&client_id=me", compression=None, max_queue=1) as connection:
        queue = frame(connection)["queue"]
        for text in sent:
            publish(client, topic, text)
        found = [frame(connection) for _ in sent]
        assert [message["data"] for message in found] == sent
        for message in found if ack == "client" else ():
            connection.send(json.dumps({"type": "ack", "id": message["id"]}))

        def settled() -> bool:
            counts = client.get(f"/v1/jobs/{queue}/stats").json()
            return (counts["ready"], counts["in_progress"]) == (0, 0)

        await eventually(settled, "the outcomes of all")


@pytest.mark.parametrize("stay", [False, True])
def test_a_client_goes_on_where_it_was_cut(served: Served, client: httpx.Client, topic: str, stay: bool) -> None:
    """Cut again and again at random while others publish; nothing is missing, doubled, or out of order."""
    total = 600
    params: dict[str, Any] = {"client_id": "me", "stay": True} if stay else {}

    def produce() -> None:
        with served.client() as publisher:
            for n in range(total):
                publish(publisher, topic, n)

    seen: list[int] = []
    last: str | None = None
    cuts = random.Random(11)
    producing = threading.Thread(target=produce)
    while len(seen) < total:
        with served.client() as one, follow(one, f"/v1/topics/{topic}/deliveries", last, **params) as events:
            assert events.next().event == "subscribed"
            if not producing.ident:
                producing.start()
            for event in events.take(min(total - len(seen), cuts.randrange(1, 60))):
                seen.append(event.json()["data"])
                last = event.id
    producing.join()
    assert seen == list(range(total))


async def test_a_subscription_that_stays_keeps_what_comes_meanwhile(client: httpx.Client, topic: str) -> None:
    path, mine = f"/v1/topics/{topic}/deliveries", {"client_id": "me", "stay": True}
    with follow(client, path, **mine) as events:
        events.next()
        publish(client, topic, 1)
        assert events.data(1) == [1]
    publish(client, topic, 2)
    assert subscribers(client, topic) == ["me"]
    with follow(client, path, **mine) as events:
        assert events.next().json()["created"] is False
        assert events.data(1) == [2]


def test_the_newest_connection_of_a_client_takes_over(served: Served, client: httpx.Client, topic: str) -> None:
    path, mine = f"/v1/topics/{topic}/deliveries", {"client_id": "me", "stay": True}
    with follow(client, path, **mine) as first:
        first.next()
        with served.client() as other, follow(other, path, **mine) as second:
            second.next()
            assert [event.event for event in first.rest()] == ["end"]
            publish(client, topic, 1)
            assert second.data(1) == [1]


async def test_a_notification_alone_ends_no_connection(served: Served, client: httpx.Client, topic: str) -> None:
    """Every role that can connect to the database can send a notification."""
    path, mine = f"/v1/topics/{topic}/deliveries", {"client_id": "me", "stay": True}
    sql = await asyncpg.connect(served.database_url)
    try:
        with follow(client, path, **mine) as events:
            events.next()
            for said in (f"taken {topic}_me", f"taken {topic}_me other", "taken", f"taken {topic}_none", "taken x y z"):
                await sql.execute("select pg_notify('penstock', $1)", said)
            for number in range(3):
                publish(client, topic, number)
            assert events.data(3) == [0, 1, 2]
    finally:
        await sql.close()


async def test_a_connection_takes_over_from_another_server(url: str) -> None:
    with serving(url) as here, serving(url) as there, here.client() as one, there.client() as other:
        topic = declare(one)
        path, mine = f"/v1/topics/{topic}/deliveries", {"client_id": "me", "stay": True}
        with follow(one, path, **mine) as first:
            first.next()
            with follow(other, path, **mine) as second:
                second.next()
                assert [event.event for event in first.rest()] == ["end"]
                publish(one, topic, 1)
                assert second.data(1) == [1]


async def test_what_a_killed_server_had_comes_to_the_next_connection(databases: TemporaryDatabases) -> None:
    with databases.database() as url, serving(url) as there, there.client() as other:
        topic = declare(other)
        seen: list[int] = []
        path, mine = f"/v1/topics/{topic}/deliveries", {"client_id": "me", "stay": True}
        # The fixture misses an orderly end.
        with (
            pytest.raises(AssertionError),
            serving(url) as here,
            here.client() as one,
            follow(one, path, **mine) as events,
        ):
            events.next()
            for n in range(20):
                publish(other, topic, n)
            taken = events.take(5)
            seen += [event.json()["data"] for event in taken]
            here.process.kill()
        assert here.process.returncode == -9
        with follow(other, path, taken[-1].id, **mine) as events:
            events.next()
            seen += events.data(15)
        assert sorted(seen) == list(range(20))


def test_a_server_that_is_told_to_stop_ends_its_connections(databases: TemporaryDatabases) -> None:
    with databases.database() as url:
        with serving(url) as served, served.client() as client:
            topic = declare(client)
            with (
                follow(client, f"/v1/topics/{topic}/deliveries") as events,
                socket(served, f"/v1/topics/{topic}/deliveries") as two,
            ):
                events.next()
                frame(two)
                served.process.terminate()
                assert [event.event for event in events.rest()] == ["end"]
                assert frame(two)["type"] == "end"
                with pytest.raises(ConnectionClosed) as closed:
                    two.recv(timeout=60)
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1001
        with serving(url) as served, served.client() as client:
            # They unsubscribed, so that no time to live has to pass.
            assert subscribers(client, topic) == []


async def test_a_socket_gets_what_is_being_written_and_the_end_when_the_server_stops(url: str) -> None:
    with serving(url, PENSTOCK_HTTP_SHUTDOWN_GRACE="300") as served, served.client() as client:
        topic = declare(client)
        # The library reads some frames ahead, and more than the buffers of the sockets hold remains.
        with socket(served, f"/v1/topics/{topic}/deliveries", compression=None, max_queue=1) as connection:
            assert frame(connection)["type"] == "subscribed"
            for _ in range(100):
                publish(client, topic, "x" * 200_000)
            first = frame(connection)["type"]
            served.process.terminate()
            await eventually(lambda: refuses(served), "the end of the listening", timeout=60)
            kinds = [first]
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    kinds.append(frame(connection)["type"])
            assert kinds[-1] == "end", kinds[-3:]
            assert set(kinds[:-1]) == {"message"}
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001


def refuses(served: Served) -> bool:
    """Whether the server accepts no connections any more."""
    try:
        httpx.get(f"{served.base_url}/healthz", timeout=60)
    except httpx.TransportError:
        return True
    return False


def test_messages_on_a_socket_are_acknowledged(served: Served, client: httpx.Client, topic: str) -> None:
    with socket(served, f"/v1/topics/{topic}/deliveries?client_id=me") as connection:
        assert frame(connection)["client_id"] == "me"
        receipts: list[dict[str, Any]] = []
        waiting = threading.Thread(
            target=lambda: receipts.append(publish(client, topic, {"n": 1}, background=False, timeout="20s"))
        )
        waiting.start()
        message = frame(connection)
        assert (message["type"], message["seq"], message["attempt"], message["data"]) == ("message", 1, 1, {"n": 1})
        connection.send(json.dumps({"type": "ack", "id": message["id"], "result": {"ok": True}}))
        waiting.join(20)
        assert [(one["status"], one["result"]) for one in receipts[0]["outcomes"]] == [("succeeded", {"ok": True})]


async def test_deliveries_enter_the_rates_with_their_times(url: str) -> None:
    with serving(url) as served, served.client() as client:
        topic = declare(client)
        path = f"/v1/topics/{topic}/deliveries"
        with socket(served, f"{path}?client_id=me") as named, follow(client, path) as nameless:
            queue = frame(named)["queue"]
            nameless.next()
            for n in range(3):
                publish(client, topic, n)
                message = frame(named)
                told = {"type": "ack"} if n else {"type": "fail", "error": "no", "retry": False}
                named.send(json.dumps({**told, "id": message["id"]}))
            nameless.data(3)
    # The server writes what it counted when it stops.
    async with Penstock(url) as app:
        database = await app.database()
        acknowledged, others = [(await rates.read_period(database, [name])).whole for name in (queue, "others")]
        assert (acknowledged.succeeded, acknowledged.failed, others.succeeded) == (2, 1, 3)
        for one in (acknowledged, others):
            assert (sum(one.waits), sum(one.runs)) == (3.0, 3.0)
        assert {one.name for one in await rates.type_rates(database)} == {queue, "others"}


async def test_a_message_that_fails_comes_again_or_not(served: Served, client: httpx.Client, topic: str) -> None:
    with socket(served, f"/v1/topics/{topic}/deliveries?client_id=me") as connection:
        queue = frame(connection)["queue"]
        client.patch(f"/v1/jobs/{queue}", json={"backoff_base_s": 0})
        publish(client, topic, 1)
        first = frame(connection)
        connection.send(json.dumps({"type": "fail", "id": first["id"], "error": "not now"}))
        second = frame(connection)
        assert (second["id"], second["attempt"]) == (first["id"], 2)
        connection.send(json.dumps({"type": "fail", "id": first["id"], "error": {"type": "Bad"}, "retry": False}))
        publish(client, topic, 2)
        assert frame(connection)["data"] == 2
        listed = {"name": queue, "details": "true"}
        archived = await eventually(lambda: client.get("/v1/archived-jobs", params=listed).json(), "the settlement")
        assert [(job["status"], [error["type"] for error in job["errors"]]) for job in archived] == [
            ("failed", ["Failed", "Bad"])
        ]


async def test_what_is_not_acknowledged_comes_to_the_next_connection(served: Served, client: httpx.Client, topic: str) -> None:
    path = f"/v1/topics/{topic}/deliveries?client_id=me&stay=true"
    with socket(served, path) as connection:
        frame(connection)
        for n in range(5):
            publish(client, topic, n)
        messages = [frame(connection) for _ in range(5)]
        for message in messages[:2]:
            connection.send(json.dumps({"type": "ack", "id": message["id"]}))
        await eventually(lambda: len(client.get(f"/v1/archived-jobs?name={topic}_me").json()) == 2, "the acknowledgements")
    with socket(served, path) as connection:
        assert frame(connection)["created"] is False
        assert [frame(connection)["data"] for _ in range(3)] == [2, 3, 4]


def test_a_socket_gets_no_more_than_its_window(served: Served, client: httpx.Client, topic: str) -> None:
    with socket(served, f"/v1/topics/{topic}/deliveries?window=2") as connection:
        frame(connection)
        for n in range(50):
            publish(client, topic, n)
        seen = []
        for _ in range(50):
            message = frame(connection)
            seen.append(message["data"])
            connection.send(json.dumps({"type": "ack", "id": message["id"]}))
        assert seen == list(range(50))


def test_connections_of_one_client_share_its_copies(served: Served, client: httpx.Client, topic: str) -> None:
    path = f"/v1/topics/{topic}/deliveries?client_id=me&stay=true&ack=client"
    with socket(served, path) as one, socket(served, path) as two:
        frame(one), frame(two)
        seen: list[Any] = []

        def receive(connection: Any) -> None:
            while True:
                try:
                    message = json.loads(connection.recv(timeout=30))
                except ConnectionClosed:
                    return
                seen.append(message["data"])
                connection.send(json.dumps({"type": "ack", "id": message["id"]}))
                if len(seen) == 40:
                    one.close()
                    two.close()

        receiving = [threading.Thread(target=receive, args=(each,)) for each in (one, two)]
        for each in receiving:
            each.start()
        for n in range(40):
            publish(client, topic, n)
        for each in receiving:
            each.join(30)
        assert sorted(seen) == list(range(40))


def test_a_socket_without_acknowledgements(served: Served, client: httpx.Client, topic: str) -> None:
    publish(client, topic, 0)
    with socket(served, f"/v1/topics/{topic}/deliveries?ack=auto&since=0") as connection:
        frame(connection)
        receipt = publish(client, topic, 1, background=False, timeout="20s")
        assert receipt["complete"] is True
        assert [frame(connection)["data"] for _ in range(2)] == [0, 1]


@pytest.mark.parametrize(
    "sent", ["{", "[]", "1", '{"type": "ack"}', '{"type": "ack", "id": 7}', '{"type": "open", "id": "x"}', "UNKNOWN"]
)
def test_a_bad_frame_is_answered_and_does_no_harm(served: Served, client: httpx.Client, topic: str, sent: str) -> None:
    with socket(served, f"/v1/topics/{topic}/deliveries") as connection:
        frame(connection)
        connection.send(json.dumps({"type": "ack", "id": str(uuid4())}) if sent == "UNKNOWN" else sent)
        answer = frame(connection)
        assert (answer["type"], answer["id"]) == ("error", "invalid_request")
        publish(client, topic, 1)
        assert frame(connection)["data"] == 1


@pytest.mark.parametrize(
    ("status", "id", "path", "options"),
    [
        (401, "unauthorized", "/v1/topics/{topic}/deliveries", {"additional_headers": {}}),
        (403, "forbidden", "/v1/topics/{topic}/deliveries", {"additional_headers": {"Authorization": "Bearer admin.wrong"}}),
        (403, "cross_site", "/v1/topics/{topic}/deliveries", {"origin": "https://evil.example.com"}),
        (403, "forbidden", "/v1/topics/{topic}/deliveries", {"subprotocols": ["penstock", subprotocol("admin.wrong")]}),
        (404, "not_found", "/v1/topics/none/deliveries", {}),
        (404, "not_found", "/v1/nothing", {}),
        (400, "invalid_parameter", "/v1/topics/{topic}/deliveries?stay=true", {}),
        (400, "invalid_parameter", "/v1/topics/{topic}/deliveries?since=9", {}),
        (
            403,
            "insecure_request",
            "/v1/topics/{topic}/deliveries",
            {"additional_headers": AUTHORIZATION | {"X-Forwarded-Proto": "http"}},
        ),
    ],
)
def test_a_socket_that_may_not_is_refused(
    served: Served, topic: str, status: int, id: str, path: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidStatus) as refused, socket(served, path.replace("{topic}", topic), **options):
        pass
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body or b"{}")["id"] == id


def test_a_browser_gives_its_token_as_a_subprotocol(served: Served, topic: str) -> None:
    options = {
        "additional_headers": {},
        "subprotocols": ["penstock", subprotocol(f"admin.{TOKEN}")],
        "origin": served.base_url,
    }
    with socket(served, f"/v1/topics/{topic}/deliveries", **options) as connection:
        assert connection.subprotocol == "penstock"
        assert frame(connection)["type"] == "subscribed"


def test_a_page_of_the_same_site_may_use_its_password(served: Served, topic: str) -> None:
    with socket(served, f"/v1/topics/{topic}/deliveries", origin=served.base_url) as connection:
        assert frame(connection)["type"] == "subscribed"


def test_a_frame_that_is_too_large_ends_the_connection(served: Served, topic: str) -> None:
    with socket(served, f"/v1/topics/{topic}/deliveries") as connection:
        frame(connection)
        connection.send("x" * 2_000_000)
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=20)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_a_socket_that_breaks_gives_its_copies_back(served: Served, client: httpx.Client, topic: str) -> None:
    with socket(served, f"/v1/topics/{topic}/deliveries?client_id=me&stay=true") as connection:
        frame(connection)
        publish(client, topic, 1)
        frame(connection)
        connection.socket.shutdown(2)
    assert [job["data"] for job in claim(client, f"{topic}_me", wait="20s")] == [1]


def test_a_gap_that_cannot_be_closed_is_said(client: httpx.Client, served: Served, topic: str) -> None:
    import asyncio

    import asyncpg

    for n in range(3):
        publish(client, topic, n)

    async def prune() -> None:
        sql = await asyncpg.connect(served.database_url)
        await sql.execute("select penstock.prune_messages(interval '0')")
        await sql.close()

    asyncio.run(prune())
    for path in (f"/v1/topics/{topic}/deliveries?since=0", f"/v1/topics/{topic}/messages?since=0"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["id"]) == (409, "conflict")
        assert "gone" in answer.json()["title"]


def test_what_was_put_off_comes_late(client: httpx.Client, topic: str) -> None:
    with follow(client, f"/v1/topics/{topic}/deliveries") as events:
        events.next()
        publish(client, topic, "late", run_after=4)
        publish(client, topic, "now")
        found = events.take(2)
        assert [(event.id, event.json()["data"]) for event in found] == [("2", "now"), ("2-1", "late")]


async def test_what_comes_late_and_is_lost_on_the_way_comes_again(client: httpx.Client, topic: str) -> None:
    path, mine = f"/v1/topics/{topic}/deliveries", {"client_id": "me", "stay": True}
    with follow(client, path, **mine) as events:
        events.next()
        publish(client, topic, "late", run_after=4)
        publish(client, topic, "later", run_after=5)
        publish(client, topic, "now")
        assert [event.id for event in events.take(3)] == ["3", "3-1", "3-2"]

    async def settled() -> bool:
        return not client.get(f"/v1/queued-jobs?name={topic}_me").json()

    await eventually(settled, "the settles")
    for last, again in (("3", ["late", "later"]), ("3-1", ["later"]), ("3-2", [])):
        with follow(client, path, last, **mine) as events:
            events.next()
            assert events.data(len(again)) == again
    publish(client, topic, "next")
    with follow(client, path, "3-1", **mine) as events:
        events.next()
        found = events.take(2)
        assert [(event.id, event.json()["data"]) for event in found] == [("3-2", "later"), ("4", "next")]
    publish(client, topic, "last")
    for last, again in (("3-2", ["next", "last"]), ("4", ["last"])):
        with follow(client, path, last, **mine) as events:
            events.next()
            assert events.data(len(again)) == again


def test_nothing_is_lost_whatever_a_broken_connection_took_with_it(served: Served, client: httpx.Client, topic: str) -> None:
    """Some are put off. Each time the connection is cut, the last events that were written do not count as received."""
    total = 300
    path, mine = f"/v1/topics/{topic}/deliveries", {"client_id": "me", "stay": True}
    chance = random.Random(12)
    seen: list[int] = []
    last: str | None = None

    def produce() -> None:
        with served.client() as publisher:
            for n in range(total):
                publish(publisher, topic, n, **({"run_after": chance.choice((0.02, 0.1, 0.5))} if n % 5 == 0 else {}))

    producing = threading.Thread(target=produce)
    while len(set(seen)) < total:
        with served.client() as one, follow(one, path, last, **mine) as events:
            assert events.next().event == "subscribed"
            if not producing.ident:
                producing.start()
            left = total - len(set(seen))
            for event in events.take(min(left, chance.randrange(2, 40)))[: -1 if left > 1 else None]:
                seen.append(event.json()["data"])
                last = event.id
    producing.join()
    assert sorted(set(seen)) == list(range(total))
    in_turn = [n for n in dict.fromkeys(seen) if n % 5]
    assert in_turn == sorted(in_turn)


def ask_often(client: httpx.Client) -> None:
    """So many requests that reach the database that what else the server does goes on meanwhile, unless it is held up."""
    for _ in range(15):
        assert client.get("/v1/topics").status_code == 200


def receiving(served: Served, path: str, last: str | None, count: int, **params: Any) -> tuple[threading.Thread, list[Any]]:
    """Receive so many in a thread: their payloads."""
    found: list[Any] = []

    def receive() -> None:
        with served.client() as one, follow(one, path, last, **params) as events:
            assert events.next().event == "subscribed"
            for _ in range(count):
                found.append(events.next().json()["data"])

    thread = threading.Thread(target=receive)
    thread.start()
    return thread, found


async def connection_of(sql: asyncpg.Connection[Any], queue: str) -> Any:
    return await sql.fetchval("select connection from penstock.subscriptions where queue = $1", queue)


async def test_what_was_just_written_to_a_cut_connection_comes_to_the_next_one(
    served: Served, client: httpx.Client, topic: str
) -> None:
    """The client is back before the database knows what its last connection was given."""
    path, mine = f"/v1/topics/{topic}/deliveries", {"client_id": "me", "stay": True}
    sql = await asyncpg.connect(served.database_url)
    try:
        with follow(client, path, **mine) as events:
            events.next()
            settling = sql.transaction()
            await settling.start()
            # What was given is archived, which has to wait for this.
            await sql.execute("lock table penstock.archived_jobs in share mode")
            for n in range(1, 4):
                publish(client, topic, n)
            assert events.data(3) == [1, 2, 3]
        first = await connection_of(sql, f"{topic}_me")

        async def is_back() -> bool:
            return bool(await connection_of(sql, f"{topic}_me") != first)

        # Of the three it got one.
        back, found = receiving(served, path, "1", 3, **mine)
        await eventually(is_back, "the return of the client")
        ask_often(client)
        publish(client, topic, 4)
        ask_often(client)
        await settling.rollback()
        back.join(60)
        assert found == [2, 3, 4]
    finally:
        await sql.close()


async def test_what_a_cut_connection_gives_back_comes_before_what_follows(
    served: Served, client: httpx.Client, topic: str
) -> None:
    """The client is back before the database has again what its last connection could not write."""
    total = 40
    path, mine = f"/v1/topics/{topic}/deliveries", {"client_id": "me", "stay": True}
    sql = await asyncpg.connect(served.database_url)
    held = "select id from penstock.queued_jobs where name = $1 and status = 'in-progress'"
    try:
        with served.client() as one, follow(one, path, **mine) as events:
            events.next()
            # More than the buffers of a connection without a reader hold.
            for n in range(total):
                publish(client, topic, {"n": n, "padding": "x" * 800_000})

            async def stuck() -> bool:
                before = await sql.fetch(held, f"{topic}_me")
                ask_often(client)
                return bool(before) and await sql.fetch(held, f"{topic}_me") == before

            await eventually(stuck, "the end of what the connection takes")
            returning = sql.transaction()
            await returning.start()
            assert await sql.fetch(f"{held} for update", f"{topic}_me")
        back, found = receiving(served, path, None, total + 1, since=0, **mine)
        publish(client, topic, {"n": total})
        ask_often(client)
        await returning.rollback()
        back.join(60)
        assert [one["n"] for one in found] == list(range(total + 1))
    finally:
        await sql.close()


async def test_what_another_held_while_later_ones_came_is_not_lost(served: Served, client: httpx.Client, topic: str) -> None:
    """Such as another server, for a connection that broke."""
    path, mine, queue = f"/v1/topics/{topic}/deliveries", {"client_id": "me", "stay": True}, f"{topic}_me"
    sql = await asyncpg.connect(served.database_url)
    try:
        subscribe(client, topic, "me")
        publish(client, topic, "held")
        held = await sql.fetchrow("select id, attempt, lease from penstock.claim('other', array[$1], 1)", queue)
        publish(client, topic, "next")
        with follow(client, path, **mine) as events:
            events.next()
            (event,) = events.take(1)
            assert (event.id, event.json()["data"]) == ("2", "next")
        release = "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], '{released}')"
        assert (await sql.fetchval(release, *held))[1] == "released"
    finally:
        await sql.close()
    with follow(client, path, "2", **mine) as events:
        events.next()
        publish(client, topic, "last")
        assert [(event.id, event.json()["data"]) for event in events.take(2)] == [("2-1", "held"), ("3", "last")]


def test_live_connections_are_counted(url: str) -> None:
    with serving(url) as served, served.client() as client:
        topic = declare(client)
        with follow(client, f"/v1/topics/{topic}/deliveries") as events, socket(served, f"/v1/topics/{topic}/deliveries") as two:
            events.next()
            frame(two)
            publish(client, topic, secrets.token_hex(2))
            events.next()
            frame(two)
            text = client.get("/metrics").text
        assert 'penstock_live_connections{kind="topic"} 1.0' in text
        assert 'penstock_live_connections{kind="socket"} 1.0' in text
        assert f'penstock_messages_published_total{{topic="{topic}"}} 1.0' in text


def test_a_subscriber_that_works_jobs_and_a_connection_are_alike(client: httpx.Client, topic: str) -> None:
    subscribe(client, topic, "worker")
    with follow(client, f"/v1/topics/{topic}/deliveries") as events:
        events.next()
        assert publish(client, topic, 1)["receivers"] == 2
        assert events.data(1) == [1]
    assert [job["data"] for job in claim(client, f"{topic}_worker")] == [1]
