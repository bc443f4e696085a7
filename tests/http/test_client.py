"""The typed clients against a real server: what a direct connection gives, through HTTP."""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from penstock import (
    Conflict,
    DatabaseUnavailable,
    EnqueueOutcome,
    InvalidInput,
    JobFailed,
    Keep,
    NewJob,
    NewMessage,
    NotFound,
    Penstock,
    Published,
    QueueFull,
    Status,
)  # fmt: skip
from penstock.client import AccessDenied, AsyncClient, Client
from penstock.topics.models import TopicRecord
from tests import command_line
from tests.http.http_server import TOKEN, Served, free_port, serving
from tests.waiting import until


@pytest.fixture
def penstock(served: Served) -> Iterator[Client]:
    with Client(served.base_url, "admin", TOKEN) as client:
        yield client


@pytest.fixture
def name(penstock: Client) -> str:
    name = f"client {uuid4()}".replace(" ", "-ü%?")
    penstock.create_job_type(name, max_attempts=3, keep_result=True, visibility_timeout="90 seconds")
    return name


def finish(penstock: Client, name: str, outcome: str = "succeeded", **fields: Any) -> str:
    (job,) = penstock.claim(name, "w1")
    return penstock.settle(job, outcome, **fields)


def test_a_jobs_life(penstock: Client, name: str) -> None:
    receipt = penstock.enqueue(name, {"n": 1}, key="acme", priority=3, run_after=timedelta(0), unique="u")
    assert receipt.outcome is EnqueueOutcome.QUEUED
    assert penstock.enqueue(name, {"n": 1}, unique="u").outcome is EnqueueOutcome.COALESCED
    assert penstock.enqueue(name, id=receipt.id).outcome is EnqueueOutcome.DUPLICATE
    record = penstock.find(receipt.id)
    assert (record.name, record.status, record.data, record.key, record.priority) == (name, Status.QUEUED, {"n": 1}, "acme", 3)
    assert finish(penstock, name, result={"price": 5}) == "succeeded"
    done = penstock.wait(receipt.id)
    assert (done.status, done.result, done.worker) == (Status.SUCCEEDED, {"price": 5}, "w1")
    assert done.finished_at is not None
    assert datetime.now(UTC) - done.finished_at < timedelta(minutes=1)
    assert penstock.enqueue(name, id=receipt.id).outcome is EnqueueOutcome.ARCHIVED
    assert penstock.result(name, receipt.id).result == {"price": 5}


def test_integers_beyond_64_bits_are_exact_or_refused(penstock: Client, name: str, served: Served) -> None:
    big = 2**70 + 1
    with psycopg.connect(served.database_url, autocommit=True) as sql:
        sql.execute("select penstock.enqueue(%s, %s)", [name, f'{{"n": {big}}}'])
        (claimed,) = penstock.claim(name, "w1")
        assert claimed.data == {"n": big}
        sql.execute(
            "select penstock.settle(array[%s::uuid], array[%s::smallint], array[%s::bigint], '{succeeded}', array[%s::jsonb])",
            [claimed.id, claimed.attempt, claimed.lease, str(big)],
        )
    assert penstock.result(name, claimed.id).result == big
    found = penstock.find(claimed.id)
    assert (found.data, found.result) == ({"n": big}, big)
    assert [job.data for job in penstock.find_many(name=name)] == [{"n": big}]
    penstock.enqueue(name, 1)
    (job,) = penstock.claim(name, "w1")
    for refused in (
        lambda: penstock.enqueue(name, {"n": big}),
        lambda: penstock.settle(job, "succeeded", result=big),
        lambda: penstock.topic(name).publish(big),
    ):
        with pytest.raises(InvalidInput, match="not JSON"):
            refused()


def test_a_job_with_options_of_its_own_that_is_snoozed(penstock: Client, name: str) -> None:
    receipt = penstock.enqueue(name, max_attempts=1, time_limit=timedelta(seconds=7))
    assert penstock.enqueue_many(name, [NewJob(2, time_limit=timedelta(seconds=8))])[0].outcome is EnqueueOutcome.QUEUED
    record = penstock.find(receipt.id)
    assert (record.max_attempts, record.time_limit, record.snoozes) == (1, timedelta(seconds=7), 0)
    (job,) = penstock.claim(name, "w1")
    assert (job.max_attempts, job.time_limit, job.snoozes) == (1, timedelta(seconds=7), 0)
    assert penstock.settle(job, "snoozed", retry_after=timedelta(hours=1)) == "snoozed"
    assert (penstock.find(receipt.id).snoozes, penstock.why(receipt.id).reason) == (1, "snoozed")


def test_a_job_holds_its_unique_key_when_it_has_ended(penstock: Client, name: str) -> None:
    hour = timedelta(hours=1)
    receipt = penstock.enqueue(name, {"n": 1}, unique="u", unique_for=hour)
    penstock.cancel(receipt.id)
    assert penstock.enqueue(name, {"n": 2}, unique="u", unique_for=hour) == (receipt.id, EnqueueOutcome.COALESCED)
    many = penstock.enqueue_many(name, [NewJob(3, unique="u", unique_for=hour), NewJob(4, unique="v", unique_for=hour)])
    assert [one.outcome for one in many] == [EnqueueOutcome.COALESCED, EnqueueOutcome.QUEUED]
    with pytest.raises(InvalidInput, match="unique_for_s"):
        penstock.enqueue(name, unique_for=hour)


def test_a_full_queue_refuses_jobs(penstock: Client, name: str) -> None:
    assert penstock.change_job_type(name, max_waiting=2).max_waiting == 2
    first = penstock.enqueue(name, {"n": 1})
    penstock.enqueue(name, {"n": 2})
    with pytest.raises(QueueFull, match="2 of at most 2 jobs wait"):
        penstock.enqueue(name, {"n": 3})
    assert penstock.enqueue(name, {"n": 1}, id=first.id).outcome is EnqueueOutcome.DUPLICATE
    assert penstock.change_job_type(name, max_waiting=None).max_waiting is None
    penstock.enqueue(name, {"n": 3})


def test_how_long_finished_jobs_are_kept(penstock: Client, name: str) -> None:
    changed = penstock.change_job_type(name, keep_succeeded=timedelta(days=2), keep_failed="40 days")
    assert changed.options.keep == Keep(timedelta(days=2), timedelta(days=40))
    assert penstock.change_job_type(name, keep_succeeded=None).options.keep == Keep(failed=timedelta(days=40))


def test_types_and_pools_are_dropped(penstock: Client, name: str) -> None:
    penstock.enqueue(name)
    with pytest.raises(Conflict, match="wait"):
        penstock.drop_job_type(name)
    penstock.drop_job_type(name, force=True)
    with pytest.raises(NotFound):
        penstock.drop_job_type(name)
    pool = f"pool of {name}".replace(" ", "-")
    created = penstock.create_pool(
        pool, slots=8, max_waiting=1, visibility_timeout=timedelta(seconds=90), key_rate_limit=5, key_rate_period="1 minute"
    )
    assert (created.key_rate_limit, created.key_rate_period) == (5, timedelta(minutes=1))
    (record,) = [record for record in penstock.job_types() if record.name == pool]
    assert (record.max_waiting, record.visibility_timeout) == (1, timedelta(seconds=90))
    penstock.drop_pool(pool)
    with pytest.raises(NotFound):
        penstock.drop_pool(pool, force=True)


def test_why_a_job_waits(penstock: Client, name: str) -> None:
    receipt = penstock.enqueue(name, run_after=timedelta(hours=1))
    why = penstock.why(receipt.id)
    assert (why.reason, why.until, why.by_job) == ("deferred", penstock.find(receipt.id).run_after, None)
    running = penstock.enqueue(name).id
    assert penstock.why(running).reason == "no-worker"
    (job,) = penstock.claim(name, "w1")
    assert (penstock.why(running).reason, penstock.why(running).worker) == ("running", "w1")
    penstock.settle(job, "succeeded")
    assert (penstock.why(running).reason, penstock.why(running).message) == ("finished", "It is finished: succeeded.")


def test_a_job_that_fails(penstock: Client, name: str) -> None:
    receipt = penstock.enqueue(name)
    assert finish(penstock, name, "failed-for-good", error="broken") == "failed"
    with pytest.raises(JobFailed, match="broken"):
        penstock.wait(receipt.id)
    copy = penstock.replay(receipt.id)
    assert penstock.find(copy.id).replay_of == receipt.id
    with pytest.raises(InvalidInput, match="Cannot replay a queued job"):
        penstock.replay(copy.id)
    assert penstock.cancel(copy.id) == "cancelled"


def test_many_jobs(penstock: Client, name: str) -> None:
    receipts = penstock.enqueue_many(name, [{"n": 1}, NewJob({"n": 2}, key="acme"), *({"n": n} for n in range(150))])
    assert len(receipts) == 152
    assert {receipt.outcome for receipt in receipts} == {EnqueueOutcome.QUEUED}
    assert len(penstock.find_many(name=name, limit=120)) == 120
    assert [job.data for job in penstock.find_many(name=name, key="acme")] == [{"n": 2}]
    assert penstock.find_many(name=name, status="failed") == []
    finish(penstock, name)
    assert len(penstock.find_many(name=name, limit=1000)) == 152
    with pytest.raises(InvalidInput, match="job 2 of 2"):
        penstock.enqueue_many(name, [NewJob(1), NewJob(2, priority=1000)])


def test_waiting_ends(penstock: Client, name: str) -> None:
    receipt = penstock.enqueue(name)
    with pytest.raises(TimeoutError):
        penstock.wait(receipt.id, timeout=timedelta(seconds=0.2))
    assert penstock.result(name, receipt.id).status is Status.QUEUED


def test_types(penstock: Client, name: str) -> None:
    (mine,) = [record for record in penstock.job_types() if record.name == name]
    assert (mine.options.max_attempts, mine.options.concurrency) == (3, None)
    assert mine.options.visibility_timeout == timedelta(seconds=90)
    changed = penstock.change_job_type(name, concurrency=2, backoff_base=timedelta(seconds=1))
    assert (changed.options.concurrency, changed.options.backoff.base) == (2, timedelta(seconds=1))
    penstock.pause(name)
    # What the server has counted for an earlier call may be some seconds old.
    until(lambda: [count.paused for count in penstock.counts() if count.name == name] == [True], "the type is counted as paused")
    penstock.resume(name)
    penstock.change_job_type(name, concurrency=0)
    with pytest.raises(Conflict):
        penstock.resume(name)


def test_a_worker(penstock: Client, name: str) -> None:
    worker = f"w-{uuid4().hex[:8]}"
    assert penstock.heartbeat(worker, names=[name], code_version="8f3c2ad")["known"] is False
    versions = {one.id: (one.version, one.code_version) for one in penstock.workers()}
    assert versions[worker] == (None, "8f3c2ad"), "Penstock is not in its process"
    penstock.enqueue(name, {"n": 1})
    (job,) = penstock.claim(name, worker, wait=timedelta(seconds=5))
    leases = penstock.extend([job], timedelta(minutes=5))
    assert penstock.heartbeat(worker)["leases"] == [leases[job.id]]
    assert penstock.settle(job) == "stale"
    penstock.unregister(worker)
    penstock.enqueue(name)


def test_callbacks(penstock: Client, name: str) -> None:
    receipt = penstock.enqueue(name)
    with pytest.raises(InvalidInput, match="attempt number may not match"):
        penstock.record_status(name, receipt.id, 2, "succeeded")
    penstock.record_status(name, receipt.id, 3, Status.SUCCEEDED, result=[1])
    assert penstock.wait(receipt.id).result == [1]


def test_errors_are_of_their_kinds(penstock: Client, served: Served) -> None:
    with pytest.raises(NotFound, match="nope"):
        penstock.enqueue("nope")
    with pytest.raises(NotFound):
        penstock.find(uuid4())
    with pytest.raises(InvalidInput):
        penstock.find("5")
    with pytest.raises(InvalidInput):
        penstock.pause("a/b")
    with Client(served.base_url, "admin", "wrong") as stranger, pytest.raises(AccessDenied):
        stranger.counts()
    with Client("http://127.0.0.1:1", timeout=timedelta(seconds=1)) as lost, pytest.raises(DatabaseUnavailable):
        lost.counts()


@pytest.mark.parametrize(
    "url", ["localhost:9090", "localhost", "", "ftp://localhost", "http://", "http://h:port", "me:s3cret@host:9090"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="begins with http:// or https://") as refused:
        Client(url)
    assert refused.value.hint == "For example: http://localhost:9090"
    assert "s3cret" not in refused.value.message


def test_a_topic_is_one_record_for_client_and_application(penstock: Client, served: Served) -> None:
    name = f"topic-{uuid4().hex[:8]}"
    topic = penstock.topic(name, catch_up=3)
    with pytest.raises(NotFound, match=name):
        topic.details()
    topic.declare()
    topic.subscribe("me")
    published = topic.publish(1, background=False, timeout=timedelta(milliseconds=10))
    topic.publish(2, key="acme")
    assert topic.publish_many([NewMessage(3, key="bolt"), 4]) == 2
    queued = sorted(penstock.find_many(name=f"{name}_me"), key=lambda job: job.data)
    assert [(job.data, job.key) for job in queued] == [(1, None), (2, "acme"), (3, "bolt"), (4, None)]
    assert isinstance(published, Published)
    assert (published.seq, published.receivers, published.complete) == (1, 1, False)
    found = topic.details()
    assert isinstance(found, TopicRecord)
    assert (found.name, found.catch_up, found.last_seq, found.subscribers) == (name, 3, 4, 1)
    app = Penstock(served.database_url)
    assert app.topic(name).sync.details() == found
    app.sync.close()
    document = httpx.get(f"{served.base_url}/openapi.json").json()["components"]["schemas"]
    assert set(document["TopicRecord"]["properties"]) == {field.name for field in fields(TopicRecord)}
    assert set(document["Published"]["properties"]) == {field.name for field in fields(Published)} | {"complete"}


def test_jobs_of_a_type_that_does_not_exist_are_not_found(penstock: Client, name: str) -> None:
    missing = name[:-1] + ("0" if name[-1] != "0" else "1")
    for status in (None, "queued", "failed"):
        with pytest.raises(NotFound, match=re.escape(missing)) as refused:
            penstock.find_many(name=missing, status=status)
        assert refused.value.hint == f"Did you mean {name!r}?"
    assert penstock.find_many(name=name) == []


def test_credentials_in_three_ways(served: Served) -> None:
    for client in (
        Client(served.base_url, token=f"admin.{TOKEN}"),
        Client(served.base_url.replace("http://", f"http://admin:{TOKEN}@")),
        Client(served.base_url, "admin", TOKEN),
    ):
        with client:
            client.counts()


async def test_the_async_client_does_the_same(served: Served) -> None:
    name = f"async-{uuid4()}"
    async with AsyncClient(served.base_url, "admin", TOKEN) as penstock:
        await penstock.create_job_type(name)
        receipts = await penstock.enqueue_many(name, range(5)) + [await penstock.enqueue(name, 5)]
        waits = asyncio.gather(*(penstock.wait(receipt.id) for receipt in receipts))
        for job in await penstock.claim(name, "w1", limit=10):
            assert await penstock.settle(job) == "succeeded"
        assert sorted(record.data for record in await waits) == [0, 1, 2, 3, 4, 5]
        assert len(await penstock.find_many(name=name, status="succeeded", limit=4)) == 4


def test_pools_and_their_standing_jobs(penstock: Client) -> None:
    name = f"pool-{uuid4().hex[:8]}"
    created = penstock.create_pool(name, slots=4, key_rate_limit=9, key_rate_period=timedelta(seconds=2))
    assert (created.slots, created.key_rate_limit, created.key_rate_period) == (4, 9, timedelta(seconds=2))
    with pytest.raises(Conflict):
        penstock.create_pool(name)
    pool = penstock.pool(name)
    key = "a/b c?ü"
    receipt = pool.enqueue(key, {"n": 1}, run_after=timedelta(0))
    assert pool.enqueue(key, {"n": 1}, id=receipt.id).outcome is EnqueueOutcome.DUPLICATE
    pool.set_weight(key, 3)
    place = pool.state(key)
    assert place.why is not None
    assert (place.next_job, place.why.reason) == (receipt.id, "no-worker")
    since = pool.pause_key(key)
    assert (pool.pause_key(key), pool.state(key).paused_at) == (since, since)
    assert [(paused.key, paused.paused_at, paused.jobs) for paused in pool.paused_keys()] == [(key, since, 1)]
    assert (pool.resume_key(key), pool.resume_key(key), pool.paused_keys()) == (True, False, [])
    [listed] = pool.list(key=key)
    assert (listed.id, listed.key, listed.status) == (receipt.id, key, "queued")
    assert pool.list(after=listed.cursor) == []
    assert (place.key, place.ready, place.weight, pool.weights()) == (key, 1, 3, {key: 3})
    assert [(worker.id, worker.slots) for worker in pool.workers()] == [(None, [0, 1, 2, 3])]
    assert (pool.start(key, 1), pool.start(key, 1), pool.start(key, 2, replace=True)) == ("starting", "unchanged", "replaced")
    with pytest.raises(Conflict, match="another payload"):
        pool.start(key, 3)
    pool.notify(key, "now")
    assert pool.reconcile({key: 2} | {f"k{n:04}": n for n in range(1500)}) == (1500, 0, 0)
    standing = pool.standing_jobs()
    assert (len(standing), standing[0].key, standing[0].data, standing[0].messages) == (1501, key, 2, 1)
    assert (pool.stop(key), pool.stop(key)) == (True, False)
    for call in (lambda: penstock.pool("nope").stop("a"), lambda: pool.notify("nobody", 1), lambda: pool.drain("nobody")):
        with pytest.raises(NotFound):
            call()
    assert (pool.change(slots=8).slots, pool.details().slots) == (8, 8)
    assert name in {one.name for one in penstock.list_pools()}
    assert isinstance(penstock.scale_advice(wait=timedelta(seconds=1.5)), list)


async def test_pools_from_asyncio(served: Served) -> None:
    name = f"pool-{uuid4().hex[:8]}"
    async with AsyncClient(served.base_url, "admin", TOKEN) as penstock:
        await penstock.create_pool(name, slots=4)
        pool = penstock.pool(name)
        assert (await pool.enqueue("acme", 1)).outcome is EnqueueOutcome.QUEUED
        assert await pool.reconcile({"acme": 1}) == (1, 0, 0)
        assert [job.key for job in await pool.standing_jobs()] == ["acme"]


def test_calls_are_repeated_while_the_server_restarts(url: str) -> None:
    port = str(free_port())
    with serving(url, "--port", port) as first, Client(first.base_url, "admin", TOKEN) as penstock:
        penstock.create_job_type("echo")
    receipts: list[Any] = []
    with Client(f"http://127.0.0.1:{port}", "admin", TOKEN) as penstock:
        waiting = threading.Thread(target=lambda: receipts.append(penstock.enqueue("echo", {"n": 1})))
        waiting.start()
        with serving(url, "--port", port):
            waiting.join(20)
    assert [receipt.outcome for receipt in receipts] == [EnqueueOutcome.QUEUED]


def cli(served: Served, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    token = {"PENSTOCK_SERVER_TOKEN": f"admin.{TOKEN}"}
    return command_line.penstock("postgresql://127.0.0.1:1/none", "--server", served.base_url, *arguments, stdin=stdin, **token)


def test_the_command_line_works_through_a_server(served: Served) -> None:
    name = f"cli-{uuid4().hex[:8]}"
    assert f"created: {name}" in cli(served, "types", "create", name, "-s", "max_attempts=3").stdout
    assert "changed" in cli(served, "types", "change", name, "-s", "visibility_timeout=90 seconds").stdout
    assert cli(served, "enqueue", name, "-f", "-", stdin='{"data": 1}\n{"data": 2, "key": "acme"}\n').stdout == "2 queued\n"
    assert cli(served, "enqueue", name, "{}").stdout.startswith("queued: ")
    id = cli(served, "jobs", "list", "--type", name, "--key", "acme", "--json").stdout.split('"id": "')[1][:36]
    assert "acme" in cli(served, "jobs", "show", id).stdout
    assert "cancelled" in cli(served, "jobs", "cancel", id).stdout
    assert "replayed" in cli(served, "jobs", "replay", id).stdout
    # The server keeps a reading of the counts for some seconds.
    until(lambda: name in cli(served, "stats").stdout, "the type in the statistics")
    assert name in cli(served, "types").stdout
    assert cli(served, "pause", name).returncode == cli(served, "resume", name).returncode == 0
    refused = cli(served, "prune")
    assert (refused.returncode, "needs the database" in refused.stderr) == (1, True)
