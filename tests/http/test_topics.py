"""Topics over HTTP: make, publish, subscribe, read."""

from __future__ import annotations

import json
import threading
import time
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.http.http_calls import claim, settle
from tests.http.topic_calls import declare, publish, subscribe
from tests.waiting import eventually


@pytest.fixture
def topic(client: httpx.Client) -> str:
    return declare(client)


def test_a_message_reaches_every_subscriber_as_a_job(client: httpx.Client, topic: str) -> None:
    assert subscribe(client, topic, "a")["created"] is True
    assert subscribe(client, topic, "a")["created"] is False
    subscribe(client, topic, "b", filter={"dest": "JFK"})
    assert [one["client_id"] for one in client.get(f"/v1/topics/{topic}/subscribers").json()] == ["a", "b"]
    assert publish(client, topic, {"dest": "JFK"})["receivers"] == 2
    assert publish(client, topic, {"dest": "SFO"})["receivers"] == 1
    assert [job["data"] for job in claim(client, f"{topic}_a", limit=5)] == [{"dest": "JFK"}, {"dest": "SFO"}]
    assert [job["data"] for job in claim(client, f"{topic}_b", limit=5)] == [{"dest": "JFK"}]
    assert (client.get(f"/v1/topics/{topic}").json()["last_seq"], client.get(f"/v1/topics/{topic}").json()["subscribers"]) == (
        2,
        2,
    )
    assert topic in {one["name"] for one in client.get("/v1/topics").json()}
    assert client.delete(f"/v1/topics/{topic}/subscribers/b").status_code == 204
    assert client.delete(f"/v1/topics/{topic}/subscribers/b").status_code == 404


def test_the_payload_keeps_its_digits(client: httpx.Client, topic: str) -> None:
    number = "12345678901234567890.123456789012345678"
    body = f'{{"data": {{"n": {number}}}}}'
    client.post(f"/v1/topics/{topic}/messages", content=body, headers={"Content-Type": "application/json"})
    assert number in client.get(f"/v1/topics/{topic}/messages").text


def test_the_options_of_a_publish(client: httpx.Client, topic: str) -> None:
    subscribe(client, topic, "a")
    id = str(uuid4())
    first = publish(client, topic, 1, id=id, unique="u")
    assert (first["id"], first["duplicate"], first["outcomes"]) == (id, False, None)
    assert publish(client, topic, 1, id=id)["duplicate"] is True
    assert publish(client, topic, 2, unique="u")["coalesced"] == 1
    publish(client, topic, 3, run_after=3600)
    publish(client, topic, 4, run_after="2020-01-01T00:00:00Z", expires_at=3600)
    publish(client, topic, 5, expires_at="2020-01-01T00:00:00Z")
    assert [job["data"] for job in claim(client, f"{topic}_a", limit=9)] == [1, 4]


def test_a_message_gives_its_copies_its_key(client: httpx.Client, topic: str) -> None:
    subscribe(client, topic, "a")
    publish(client, topic, 1, key="acme")
    publish(client, topic, 2)
    lines = '{"data": 3, "key": "bolt"}\n{"data": 4}\n{"data": 5, "key": "a\\u0000b"}\n{"data": 6, "key": ""}\n'
    headers = {"Content-Type": "application/x-ndjson"}
    answers = client.post(f"/v1/topics/{topic}/messages", content=lines, headers=headers).text.splitlines()
    assert [json.loads(line).get("outcome") for line in answers] == ["published", "published", None, None]
    copies = [(job["data"], job["key"]) for job in claim(client, f"{topic}_a", limit=9)]
    assert copies == [(1, "acme"), (2, None), (3, "bolt"), (4, None)]
    for wrong in ("", "x" * 256, "two\nlines", "a\x00b", 3):
        assert client.post(f"/v1/topics/{topic}/messages", json={"data": 1, "key": wrong}).status_code == 400, wrong


def test_a_publisher_hears_what_became_of_its_message(client: httpx.Client, topic: str) -> None:
    subscribe(client, topic, "a")
    subscribe(client, topic, "b")
    receipts: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: receipts.append(publish(client, topic, 1, background=False, timeout="20s")))
    waiting.start()
    for name, outcome, fields in (("a", "succeeded", {"result": 7}), ("b", "failed-for-good", {"error": "broken"})):
        (job,) = claim(client, f"{topic}_{name}", wait="10s")
        settle(client, f"{topic}_{name}", job, outcome, **fields)
    waiting.join(20)
    (receipt,) = receipts
    assert receipt["complete"] is True
    assert {one["client_id"]: (one["status"], one["result"]) for one in receipt["outcomes"]} == {
        "a": ("succeeded", 7),
        "b": ("failed", None),
    }


def test_at_the_time_limit_a_publisher_gets_what_is_known(client: httpx.Client, topic: str) -> None:
    subscribe(client, topic, "a")
    started = time.monotonic()
    receipt = publish(client, topic, 1, background=False, timeout="300ms")
    assert time.monotonic() - started >= 0.3
    assert (receipt["complete"], [one["status"] for one in receipt["outcomes"]]) == (False, ["queued"])


async def test_a_subscription_that_is_not_renewed_ends(client: httpx.Client, topic: str) -> None:
    subscribe(client, topic, "a", ttl_s=60)
    assert client.post(f"/v1/topics/{topic}/subscribers/a/renew").json() == {"renewed": True}
    subscribe(client, topic, "a", ttl_s=1)

    def ended() -> bool:
        return client.get(f"/v1/topics/{topic}/subscribers").json() == []

    await eventually(ended, "the end")
    assert client.post(f"/v1/topics/{topic}/subscribers/a/renew").json() == {"renewed": False}


def test_late_joiners_and_readers_get_what_is_kept(client: httpx.Client) -> None:
    topic = declare(client, catch_up=2)
    for n in range(5):
        publish(client, topic, n)
    assert subscribe(client, topic, "a")["replayed"] == 2
    assert subscribe(client, topic, "b", since=1)["replayed"] == 4
    assert [message["data"] for message in client.get(f"/v1/topics/{topic}/messages?since=3").json()] == [3, 4]
    assert [message["seq"] for message in client.get(f"/v1/topics/{topic}/messages?limit=2").json()] == [1, 2]


@pytest.mark.parametrize(
    ("status", "method", "path", "body"),
    [
        (400, "POST", "/v1/topics", {"name": "a b"}),
        (400, "POST", "/v1/topics", {"name": "a\u0000"}),
        (400, "POST", "/v1/topics", {"name": "x", "catch_up": -1}),
        (404, "GET", "/v1/topics/none", None),
        (404, "GET", "/v1/topics/none/subscribers", None),
        (404, "GET", "/v1/topics/none/messages", None),
        (404, "GET", "/v1/topics/none/deliveries", None),
        (404, "POST", "/v1/topics/none/messages", {"data": 1}),
        (404, "PUT", "/v1/topics/none/subscribers/a", {}),
        (404, "DELETE", "/v1/topics/none/subscribers/a", None),
        (400, "PUT", "/v1/topics/{topic}/subscribers/a", {"ttl_s": 0.1}),
        (400, "PUT", "/v1/topics/{topic}/subscribers/a", {"since": 9}),
        (400, "PUT", "/v1/topics/{topic}/subscribers/a", {"tll_s": 1}),
        (400, "PUT", "/v1/topics/{topic}/subscribers/{long}", {}),
        (400, "POST", "/v1/topics/{topic}/messages", {"data": "\u0000"}),
        (400, "POST", "/v1/topics/{topic}/messages", {"data": 1, "id": "x"}),
        (400, "POST", "/v1/topics/{topic}/messages", {"data": 1, "run_after": "2026-01-01T00:00:00"}),
        (400, "POST", "/v1/topics/{topic}/messages", {"data": 1, "unique": ""}),
        (400, "POST", "/v1/topics/{topic}/messages", {"data": 1, "timeout": "long"}),
        (400, "POST", "/v1/topics/{topic}/messages", [1]),
        (413, "POST", "/v1/topics/{topic}/messages", {"data": "x" * 2_000_000}),
        (400, "GET", "/v1/topics/{topic}/messages?since=7", None),
        (400, "GET", "/v1/topics/{topic}/messages?limit=0", None),
        (400, "GET", "/v1/topics/{topic}/deliveries?stay=true", None),
        (400, "GET", "/v1/topics/{topic}/deliveries?ttl_s=5", None),
        (400, "GET", "/v1/topics/{topic}/deliveries?filter={", None),
        (400, "GET", "/v1/topics/{topic}/deliveries?since=7", None),
    ],
)
def test_a_bad_call_is_refused(client: httpx.Client, topic: str, status: int, method: str, path: str, body: Any) -> None:
    path = path.replace("{topic}", topic).replace("{long}", "x" * 200)
    answer = client.request(method, path, json=body) if body is not None else client.request(method, path)
    assert (answer.status_code, "title" in answer.json()) == (status, True), answer.text
    assert client.get(f"/v1/topics/{topic}/messages").json() == []


def test_names_that_would_collide_are_refused(client: httpx.Client) -> None:
    topic = declare(client)
    client.post("/v1/topics", json={"name": f"{topic}_a"})
    subscribe(client, topic, "a_b")
    answer = client.put(f"/v1/topics/{topic}_a/subscribers/b")
    assert (answer.status_code, answer.json()["id"]) == (409, "conflict")


def lines(client: httpx.Client, topic: str, *messages: Any) -> httpx.Response:
    body = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in messages)
    return client.post(f"/v1/topics/{topic}/messages", content=body, headers={"Content-Type": "application/x-ndjson"})


def outcomes(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_many_messages_are_lines(client: httpx.Client, topic: str) -> None:
    subscribe(client, topic, "a")
    id = str(uuid4())
    answer = lines(client, topic, {"data": 1, "id": id}, "", {"data": {"n": 2}}, {"data": 3, "run_after": 3600}, {})
    assert answer.status_code == 200
    told = outcomes(answer)
    assert [(one["line"], one["seq"], one["outcome"]) for one in told] == [
        (1, 1, "published"), (3, 2, "published"), (4, 3, "published"), (5, 4, "published"),
    ]  # fmt: skip
    assert told[0]["id"] == id
    again = outcomes(lines(client, topic, {"data": 1, "id": id}, {"data": 5}))
    assert [(one["seq"], one["outcome"]) for one in again] == [(1, "duplicate"), (5, "published")]
    assert [job["data"] for job in claim(client, f"{topic}_a", limit=9)] == [1, {"n": 2}, {}, 5]
    assert outcomes(lines(client, topic)) == []


def test_more_lines_than_a_part(client: httpx.Client, topic: str) -> None:
    answer = lines(client, topic, *({"data": n} for n in range(2_500)))
    assert [(one["line"], one["seq"]) for one in outcomes(answer)] == [(n, n) for n in range(1, 2_501)]
    assert [one["data"] for one in client.get(f"/v1/topics/{topic}/messages?since=1500&limit=10000").json()] == list(
        range(1_500, 2_500)
    )


@pytest.mark.parametrize(
    ("bad", "status", "said"),
    [
        ("{", 200, "not a message"),
        ("[1]", 200, "not a message"),
        ('{"background": false}', 200, "background"),
        ('{"data": "\\u0000"}', 200, "U+0000"),
        ('{"unique": ""}', 200, "unique key"),
        ('{"unique": "\\u0000"}', 200, "U+0000"),
        ('{"id": "x"}', 200, "id"),
        ('{"run_after": -1}', 200, "seconds"),
        ('{"run_after": "2030-01-01T00:00:00"}', 200, "time zone"),
        (json.dumps({"data": "x" * 1_100_000}), 413, "too long"),
    ],
)
def test_a_bad_line_does_not_stop_the_others(client: httpx.Client, topic: str, bad: str, status: int, said: str) -> None:
    answer = lines(client, topic, {"data": 1}, {"data": 2}, bad, {"data": 4})
    assert said in answer.text
    there = [one["data"] for one in client.get(f"/v1/topics/{topic}/messages").json()]
    assert answer.status_code == status, answer.text
    if status == 200:
        assert [one["line"] for one in outcomes(answer)] == [1, 2, 3, 4]
        assert ["error" in one for one in outcomes(answer)] == [False, False, True, False]
        assert there == [1, 2, 4]
    else:
        # What has no end cannot be passed over.
        assert there in ([], [1, 2])


def test_an_id_of_another_topic_is_refused(client: httpx.Client, topic: str) -> None:
    taken = publish(client, declare(client))["id"]
    answer = outcomes(lines(client, topic, {"data": 1}, {"data": 2, "id": taken}, {"data": 3}))
    assert [one.get("outcome") or one["error"]["id"] for one in answer] == ["published", "conflict", "published"]
    assert lines(client, "t-none", {"data": 1}).status_code == 404


def test_one_message_cannot_be_as_large_as_a_batch(client: httpx.Client, topic: str) -> None:
    answer = client.post(f"/v1/topics/{topic}/messages", json={"data": "x" * 1_100_000})
    assert answer.status_code == 413
