"""Consumer groups over HTTP: the same ownership and fences as in Python."""

from __future__ import annotations

import secrets
import threading
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest

from penstock.client import Client
from tests.http.http_server import TOKEN, Served
from tests.http.stream_requests import append, append_lines, create
from tests.waiting import eventually


class Member:
    """A member of the group g."""

    def __init__(self, client: httpx.Client, stream: str, **fields: Any) -> None:
        self.client = client
        self.id = f"m-{secrets.token_hex(4)}"
        self.path = f"/v1/streams/{stream}/groups/g/members/{self.id}"
        answer = client.put(self.path, json=fields)
        assert answer.status_code == 200, answer.text
        self.session = answer.json()["session"]

    def read(self, **fields: Any) -> dict[str, Any]:
        answer = self.client.post(f"{self.path}/read", json={"session": self.session, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def commit(self, *batches: dict[str, Any]) -> dict[str, str]:
        commits = [{field: batch[field] for field in ("partition", "epoch", "revision", "next_offset")} for batch in batches]
        answer = self.client.post(f"{self.path}/commit", json={"commits": commits})
        assert answer.status_code == 200, answer.text
        outcomes: dict[str, str] = answer.json()["outcomes"]
        return outcomes

    def leave(self) -> int:
        return self.client.delete(self.path, params={"session": self.session}).status_code


def data(answer: dict[str, Any]) -> list[Any]:
    return [event["data"] for batch in answer["batches"] for event in batch["events"]]


def group(client: httpx.Client, stream: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/streams/{stream}/groups/g").json()
    return found


def test_a_member_reads_commits_and_goes_on(client: httpx.Client) -> None:
    stream = create(client)
    append_lines(client, stream, [{"data": n} for n in range(10)])
    member = Member(client, stream)
    first = member.read(limit=4)
    assert data(first) == [0, 1, 2, 3]
    assert first["partitions"] == {"0": 1}
    # Not committed: they come again.
    assert data(member.read(limit=4)) == [0, 1, 2, 3]
    assert member.commit(*first["batches"]) == {"0": "committed"}
    assert data(member.read(limit=4)) == [4, 5, 6, 7]
    assert data(member.read(limit=4, ahead={"0": 8})) == [8, 9]
    assert (group(client, stream)["lag"], group(client, stream)["partitions"][0]["owner"]) == (6, member.id)
    assert group(client, stream)["members"][0]["partitions"] == 1
    assert client.get(f"/v1/streams/{stream}/groups").json()[0]["lag"] == 6
    assert client.delete(f"/v1/streams/{stream}/groups/g").json()["id"] == "conflict"
    assert member.leave() == 204
    assert member.leave() == 404
    assert client.delete(f"/v1/streams/{stream}/groups/g").status_code == 204
    assert client.get(f"/v1/streams/{stream}/groups/g").status_code == 404


def test_partitions_share_the_limit(client: httpx.Client) -> None:
    stream = create(client, 4)
    append_lines(client, stream, [{"data": n, "key": str(n)} for n in range(400)])
    append_lines(client, stream, [{"data": n, "key": "one"} for n in range(400)])
    member = Member(client, stream)
    seen: list[int] = []
    while batches := member.read(limit=50)["batches"]:
        assert sum(len(batch["events"]) for batch in batches) <= 50
        seen += [event["data"] for batch in batches for event in batch["events"]]
        member.commit(*batches)
    assert sorted(seen) == sorted([*range(400), *range(400)])


def test_a_read_waits_for_an_event_and_for_a_partition(client: httpx.Client, served: Served) -> None:
    stream = create(client, 2)
    first, second = Member(client, stream), Member(client, stream)
    found: list[Any] = []

    def consume(member: Member) -> None:
        with served.client() as own:
            member.client = own
            for _ in range(50):
                batches = member.read(wait="1s")["batches"]
                found.extend(event["data"] for batch in batches for event in batch["events"])
                if batches:
                    member.commit(*batches)
                if len(found) >= 20:
                    return

    consuming = [threading.Thread(target=consume, args=(member,)) for member in (first, second)]
    for one in consuming:
        one.start()
    for n in range(20):
        append(client, stream, n, key=str(n))
    for one in consuming:
        one.join(60)
    assert sorted(found) == list(range(20))


def test_a_joiner_gets_its_share_and_the_others_commit_is_stale(client: httpx.Client) -> None:
    stream = create(client, 2)
    append_lines(client, stream, [{"data": n, "key": str(n)} for n in range(50)])
    first = Member(client, stream)
    mine = first.read(limit=1_000)
    assert set(mine["partitions"]) == {"0", "1"}
    second = Member(client, stream)
    # Nothing moves while the first one works on what it has.
    assert second.read()["partitions"] == {}
    kept = first.read(busy=[0, 1])
    (moving,) = kept["revoked"]
    assert (kept["batches"], len(kept["partitions"])) == ([], 2)
    # It asks for more without naming that one: it has given it up.
    stays = first.read()["partitions"]
    assert set(stays) == {"0", "1"} - {str(moving)}
    theirs = second.read(limit=1_000)
    assert theirs["partitions"] == {str(moving): 2}
    late = [batch for batch in mine["batches"] if batch["partition"] == moving]
    assert first.commit(*late) == {str(moving): "stale"}
    assert second.commit(*theirs["batches"]) == {str(moving): "committed"}
    # The owner of a partition under an old epoch is refused as well.
    assert second.commit({**theirs["batches"][0], "epoch": 1}) == {str(moving): "stale"}
    assert first.leave() == 204
    assert len(second.read()["partitions"]) == 2


async def test_a_member_that_does_not_finish_in_time_loses_the_partition(databases: Any) -> None:
    from tests.http.http_server import serving

    with databases.database() as url, serving(url, PENSTOCK_HANDOVER_GRACE="0.5") as served, served.client() as client:
        stream = create(client, 1)
        first = Member(client, stream)
        append(client, stream, 1)
        held = first.read()
        assert data(held) == [1]
        second = Member(client, stream)
        # Drained by hand, so that the one partition is to move.
        sql = await asyncpg.connect(url)
        await sql.execute("select penstock.drain_member($1, $2)", f"{stream}/g", first.id)
        await sql.close()

        def moved() -> bool:
            first.client.post(f"{first.path}/heartbeat", json={"session": first.session})
            return bool(second.read()["partitions"])

        await eventually(moved, "the move")
        assert first.commit(*held["batches"]) == {"0": "stale"}


async def test_a_silent_member_is_evicted_and_told_so(client: httpx.Client) -> None:
    stream = create(client)
    silent, other = Member(client, stream, dead_after_s=3), Member(client, stream)
    assert data(silent.read()) == []

    def taken() -> bool:
        return bool(other.read()["partitions"])

    await eventually(taken, "the eviction")
    for call in ("read", "heartbeat"):
        answer = client.post(f"{silent.path}/{call}", json={"session": silent.session})
        assert (answer.status_code, answer.json()["id"]) == (404, "not_found")
        assert "join again" in answer.json()["detail"]


def test_joining_again_with_the_same_session_is_the_same_membership(client: httpx.Client) -> None:
    member = Member(client, create(client))
    assert client.put(member.path, json={"session": member.session}).status_code == 200
    assert client.put(member.path, json={"session": str(uuid4())}).json()["id"] == "conflict"


def test_a_group_is_moved_paused_and_resumed(client: httpx.Client) -> None:
    stream = create(client)
    append_lines(client, stream, [{"data": n} for n in range(5)])
    member = Member(client, stream, start="latest")
    assert data(member.read()) == []
    groups = f"/v1/streams/{stream}/groups/g"
    assert client.post(f"{groups}/seek", json={"to": "earliest"}).json() == {"partitions": 1}
    before = member.read()
    assert data(before) == [0, 1, 2, 3, 4]
    client.post(f"{groups}/seek", json={"offsets": {"0": 3}})
    assert member.commit(*before["batches"]) == {"0": "stale"}
    assert data(member.read()) == [3, 4]
    client.post(f"{groups}/seek", json={"time": "2020-01-01T00:00:00Z"})
    assert len(data(member.read())) == 5
    assert client.post(f"{groups}/pause", json={"reason": "a look at it"}).json() == {"partitions": 1}
    assert client.post(f"{groups}/pause").json() == {"partitions": 0}
    assert data(member.read()) == []
    assert group(client, stream)["partitions"][0]["pause_reason"] == "a look at it"
    assert client.post(f"{groups}/resume", json={"partitions": [0]}).json() == {"partitions": 1}
    assert len(data(member.read())) == 5


async def test_what_retention_dropped_is_gone_or_skipped(client: httpx.Client, served: Served) -> None:
    stream = create(client, keep_events=1)
    member = Member(client, stream)
    append(client, stream, 1)
    sql = await asyncpg.connect(served.database_url)
    await sql.execute("select penstock.roll_segment($1)", stream)
    append(client, stream, 2)
    await sql.execute("select penstock.retire_segments($1)", stream)
    await sql.close()
    answer = client.post(f"{member.path}/read", json={"session": member.session})
    assert (answer.status_code, answer.json()["id"]) == (410, "offset_gone")
    assert data(member.read(auto_offset_reset="earliest")) == [2]
    assert data(member.read(auto_offset_reset="latest")) == []


def test_a_misspelled_key_of_an_event_is_refused(client: httpx.Client) -> None:
    stream = create(client)
    answer = client.post(f"/v1/streams/{stream}/events", json={"data": 1, "kye": "acme"})
    assert (answer.status_code, "kye" in answer.text) == (400, True)
    assert data(Member(client, stream).read()) == []


def test_a_member_notes_that_it_fails(client: httpx.Client) -> None:
    stream = create(client)
    append_lines(client, stream, [{"data": n} for n in range(3)])
    member = Member(client, stream)
    batch = member.read(limit=1)["batches"][0]
    failure = {field: batch[field] for field in ("partition", "epoch", "revision")} | {"offset": batch["first_offset"]}

    def note(**fields: Any) -> Any:
        return client.post(f"{member.path}/failures", json={**failure, "error": "ConnectError: refused", **fields})

    def failing() -> Any:
        lag = group(client, stream)["partitions"][0]
        return lag["failing_offset"], lag["failing_attempt"], lag["failing_error"]

    assert note().json() == {"noted": True}
    assert failing() == (0, 1, "ConnectError: refused")
    assert note(attempt=4, error="still\x00refused").json() == {"noted": True}
    assert failing() == (0, 4, "still\ufffdrefused")
    # Not another's, and not what is done.
    assert note(epoch=batch["epoch"] + 1).json() == {"noted": False}
    assert member.commit(batch) == {"0": "committed"}
    assert note().json() == {"noted": False}
    assert failing() == (None, None, None)
    assert note(attempt=0).status_code == 400
    assert note(error="").status_code == 400
    assert client.post(f"/v1/streams/{stream}/groups/none/members/m/failures", json={**failure, "error": "x"}).status_code == 404


def test_the_clients_note_failures(client: httpx.Client, served: Served) -> None:
    stream = create(client)
    append_lines(client, stream, [{"data": 0}])
    with Client(served.base_url, "admin", TOKEN) as penstock:
        orders = penstock.stream(stream)
        member = orders.join("g")
        (batch,) = member.read().batches
        assert member.fail(batch, "ConnectError: refused", attempt=2)
        (lag,) = orders.lag("g")
        assert (lag.failing_offset, lag.failing_attempt, lag.failing_error) == (0, 2, "ConnectError: refused")
        member.commit(batch)
        assert not member.fail(batch, "late")


def test_a_replayed_letter_of_another_group_is_passed_over(client: httpx.Client) -> None:
    stream = create(client)
    other = {"replayed": {"group": "other"}}
    lines = [{"data": 0}, {"data": 1, "headers": other}, {"data": 2, "headers": {"replayed": {"group": "g"}}}]
    append_lines(client, stream, [*lines, {"data": 3, "headers": other}])
    member = Member(client, stream)
    answer = member.read()
    assert data(answer) == [0, 2]
    assert answer["batches"][0]["next_offset"] == 4
    member.commit(*answer["batches"])
    assert data(member.read()) == []
    assert group(client, stream)["lag"] == 0


def test_a_waiting_member_stays_alive(client: httpx.Client) -> None:
    stream = create(client)
    member = Member(client, stream, dead_after_s=2)
    assert data(member.read(wait="6s")) == []
    assert member.read()["partitions"] == {"0": 1}


@pytest.mark.parametrize(
    ("status", "method", "path", "body"),
    [
        (404, "GET", "groups/none", None),
        (404, "DELETE", "groups/none", None),
        (404, "POST", "groups/none/seek", {"to": "latest"}),
        (404, "POST", "groups/none/pause", {}),
        (404, "POST", "groups/none/members/m/read", {"session": str(uuid4())}),
        (
            404,
            "POST",
            "groups/none/members/m/commit",
            {"commits": [{"partition": 0, "epoch": 1, "revision": 0, "next_offset": 0}]},
        ),
        (400, "PUT", "groups/a$b/members/m", {}),
        (404, "PUT", "groups/a b/members/m", {}),
        (400, "PUT", "groups/g/members/m m", {}),
        (400, "PUT", "groups/g/members/m", {"start": "middle"}),
        (400, "PUT", "groups/g/members/m", {"dead_after_s": 0}),
        (400, "POST", "groups/g/seek", {}),
        (400, "POST", "groups/g/seek", {"to": "latest", "offsets": {"0": 0}}),
        (400, "POST", "groups/g/seek", {"offsets": {"0": 99}}),
        (400, "POST", "groups/g/members/m/read", {}),
        (400, "POST", "groups/g/members/m/read", {"session": str(uuid4()), "limit": 0}),
        (404, "POST", "groups/g/members/m/heartbeat", {"session": str(uuid4())}),
        (400, "POST", "groups/g/members/m/commit", {"commits": []}),
        (400, "POST", "groups/g/members/m/commit", {"commits": [{"partition": 0, "epoch": 1, "revision": 0, "next_offset": 99}]}),
        (400, "DELETE", "groups/g/members/m?session=x", None),
        (400, "DELETE", "groups/g/members/m", None),
    ],
)
def test_a_bad_call_is_refused(client: httpx.Client, status: int, method: str, path: str, body: Any) -> None:
    stream = create(client)
    client.post(f"/v1/streams/{stream}/events", json={"data": 1})
    Member(client, stream)
    answer = client.request(method, f"/v1/streams/{stream}/{path}", json=body)
    assert (answer.status_code, "title" in answer.json()) == (status, True), answer.text
