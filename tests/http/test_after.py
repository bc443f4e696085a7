"""Jobs that wait for others, over HTTP and its clients: `after` and `when`, and the status that each client sees."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import asyncpg
import httpx
import pytest

from penstock import EnqueueOutcome, InvalidInput, NewJob, Status
from penstock.client import Client
from tests.http.http_server import TOKEN, Served
from tests.waiting import until


@pytest.fixture
def penstock(served: Served) -> Iterator[Client]:
    with Client(served.base_url, "admin", TOKEN) as client:
        yield client


def test_a_job_waits_and_is_queued_for_rickovers_clients(penstock: Client, client: httpx.Client, echo: str) -> None:
    first, later = f"job_{uuid4()}", f"job_{uuid4()}"
    client.put(f"/v1/jobs/{echo}/{first}", json={"data": 1}).raise_for_status()
    put = client.put(f"/v1/jobs/{echo}/{later}", json={"data": 2, "after": [first], "when": "finished"})
    assert (put.status_code, put.json()["status"], put.headers["penstock-outcome"]) == (202, "queued", "waiting")
    assert client.get(f"/v1/jobs/{echo}/{later}").json()["status"] == "queued"
    details = client.get(f"/v1/jobs/{echo}/{later}?details=true").json()
    assert (details["status"], details["after"], details["when"]) == ("waiting", [first], "finished")
    assert details["why"]["reason"] == "dependencies"
    listed = client.get(f"/v1/queued-jobs?name={echo}&status=waiting").json()
    assert [(job["id"], job["status"]) for job in listed] == [(later, "queued")]
    assert client.post(f"/v1/jobs/{later}/replay").status_code == 400

    (job,) = penstock.claim(echo, "w1")
    assert penstock.settle(job, "failed-for-good") == "failed"
    # The server does the maintenance of a worker too.
    released = until(lambda: penstock.claim(echo, "w1"), "the release")
    assert [f"job_{job.id}" for job in released] == [later]


async def test_a_suspended_job_is_queued_for_rickovers_clients_until_its_signal(
    penstock: Client, client: httpx.Client, served: Served, echo: str
) -> None:
    job = f"job_{uuid4()}"
    client.put(f"/v1/jobs/{echo}/{job}", json={"data": 1}).raise_for_status()
    (claimed,) = penstock.claim(echo, "w1")
    held = claimed.id, claimed.attempt, claimed.lease
    sql = await asyncpg.connect(served.database_url)
    try:
        begun = "select state from penstock.begin_waits(array[$1::uuid], array[$2::bigint], array['wait'], array['approved'])"
        assert await sql.fetchval(begun, held[0], held[2]) == "open"
        settled = (
            "select outcome from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array['suspended'],"
            ' array[\'{"step": "approved"}\'::jsonb])'
        )
        assert await sql.fetchval(settled, *held) == "suspended"
    finally:
        await sql.close()
    assert client.get(f"/v1/jobs/{echo}/{job}").json()["status"] == "queued"
    details = client.get(f"/v1/jobs/{echo}/{job}?details=true").json()
    assert (details["status"], details["why"]["reason"]) == ("waiting", "signal")
    assert [each["id"] for each in client.get(f"/v1/queued-jobs?name={echo}&status=waiting").json()] == [job]
    assert penstock.claim(echo, "w1") == []
    assert penstock.signal(job, "approved", True)
    (again,) = until(lambda: penstock.claim(echo, "w1"), "the job that goes on")
    assert (again.id, again.attempt) == (claimed.id, 1)


def test_the_client_enqueues_after_a_job(penstock: Client, echo: str) -> None:
    first = penstock.enqueue(echo, 1)
    later = penstock.enqueue(echo, 2, after=first)
    (last,) = penstock.enqueue_many(echo, [NewJob(3, after=[first, later.id], when="finished")])
    assert (later.outcome, last.outcome) == (EnqueueOutcome.WAITING, EnqueueOutcome.WAITING)
    record = penstock.find(last.id)
    assert (record.status, set(record.after), record.when) == (Status.WAITING, {first.id, later.id}, "finished")
    assert penstock.cancel(first.id) == "cancelled"
    cancelled = until(lambda: (found := penstock.find(later.id)).status.finished and found, "the end of what waited")
    assert (cancelled.status, cancelled.reason) == (Status.CANCELLED, "dependency")


@pytest.mark.parametrize(
    ("body", "title"),
    [
        ({"after": []}, "Invalid after: 0 jobs"),
        ({"after": ["x"]}, "Invalid after: x"),
        ({"after": [f"job_{uuid4()}"] * 101}, "Invalid after: 101 jobs"),
        ({"when": "finished"}, "Invalid when: there is no after"),
        ({"after": [f"job_{uuid4()}"], "when": "never"}, "Invalid when: never"),
        ({"after": ["job_00000000-0000-0000-0000-000000000007"]}, "does not exist: 00000000-0000-0000-0000-000000000007"),
    ],
)
def test_what_cannot_be_waited_for_is_refused(client: httpx.Client, echo: str, body: dict[str, object], title: str) -> None:
    answer = client.put(f"/v1/jobs/{echo}/job_{uuid4()}", json={"data": 1, **body})
    assert answer.status_code == 400
    assert title in answer.json()["title"], answer.json()


def test_the_client_says_what_is_wrong(penstock: Client, echo: str) -> None:
    with pytest.raises(InvalidInput, match="does not exist"):
        penstock.enqueue(echo, 1, after=uuid4())
