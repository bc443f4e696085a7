"""The bridge, with a real gearmand and the real command line tool."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import httpx
import pytest

from penstock import Job, Penstock, Status
from tests.gearman.conftest import WITHOUT_GEARMAN, Caller, Gearmand, bridging
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
pytestmark = pytest.mark.skipif(bool(WITHOUT_GEARMAN), reason=WITHOUT_GEARMAN)
BOB = json.dumps({"topic": "officememos", "client_id": "bob"})
ALICE = json.dumps({"topic": "officememos", "client_id": "alice"})
MEMO = json.dumps({"topic": "officememos", "payload": "please go home early today."})


async def test_the_example_of_gearhorns_readme(url: str, gearmand: Gearmand, inbox: Path) -> None:
    async with bridging(url, gearmand):
        workers = [
            gearmand.worker(f"officememos_{name}", "sh", "-c", f"cat >> {inbox}/{name}; printf heard")
            for name in ("bob", "alice")
        ]
        try:
            for subscription in (BOB, ALICE, ALICE):
                assert await gearmand.client("subscribe_fanout", subscription) == (0, "")
            assert await gearmand.client("fanout", MEMO) == (0, "2")
            assert {file.name: file.read_text() for file in inbox.iterdir()} == {
                "bob": "please go home early today.",
                "alice": "please go home early today.",
            }
            assert await gearmand.client("unsubscribe_fanout", BOB) == (0, "")
            assert await gearmand.client("fanout", MEMO) == (0, "1")
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()


async def test_background_does_not_wait_and_reaches_those_who_come_later(url: str, gearmand: Gearmand, inbox: Path) -> None:
    memo = json.dumps({"topic": "officememos", "payload": {"n": 1}, "background": True})
    async with bridging(url, gearmand):
        await gearmand.client("subscribe_fanout", BOB)
        assert await gearmand.client("fanout", memo) == (0, "0")
        assert await gearmand.client("fanout", memo, "-b") == (0, "")
        await eventually(lambda: gearmand.status().get("officememos_bob", [0])[0] == 2, "two jobs in gearmand")
        worker = gearmand.worker("officememos_bob", "sh", "-c", f"cat >> {inbox}/bob; echo >> {inbox}/bob")
        try:
            await eventually(lambda: (inbox / "bob").exists() and (inbox / "bob").read_text() == '{"n":1}\n' * 2, "both memos")
        finally:
            worker.kill()
            worker.communicate()


async def test_a_publish_without_subscribers_has_zero_receivers(url: str, gearmand: Gearmand) -> None:
    async with bridging(url, gearmand):
        assert await gearmand.client("fanout", MEMO) == (0, "0")
        assert await gearmand.client("unsubscribe_fanout", BOB) == (0, "")


async def test_failures_and_time_outs_of_receivers_are_listed(url: str, gearmand: Gearmand, caller: Caller) -> None:
    # Those that are there answer in a moment; the one that is not is waited for.
    async with bridging(url, gearmand, timeout=timedelta(seconds=5)):
        good = gearmand.worker("officememos_alice", "cat")
        bad = gearmand.worker("officememos_bob", "false")
        try:
            await eventually(
                lambda: gearmand.workers_of("officememos_bob") and gearmand.workers_of("officememos_alice"), "workers"
            )
            for client in ("bob", "alice", "carol"):
                await caller.call("subscribe_fanout", json.dumps({"topic": "officememos", "client_id": client}).encode())
            kind, text = await caller.call("fanout", MEMO.encode())
            assert kind == "refused"
            assert sorted(json.loads(text)) == [["bob", "Worker failure"], ["carol", "Worker timeout"]]
        finally:
            for worker in (good, bad):
                worker.kill()
                worker.communicate()


REFUSED = [
    ("fanout", b"nonsense", b"Expecting value: line 1 column 1 (char 0)"),
    ("fanout", b"\xff\xfe", b""),
    ("fanout", b"", b"Expecting value: line 1 column 1 (char 0)"),
    ("fanout", b"[" * 100_000, b""),
    ("fanout", b"[1]", b"must be a mapping"),
    ("fanout", b"{}", b"must have topic and payload keys"),
    ("fanout", b'{"topic": "t"}', b"must have topic and payload keys"),
    ("fanout", b'{"topic": 5, "payload": 1}', b"topic must be text"),
    ("fanout", b'{"topic": "a b", "payload": 1}', b"invalid topic: 'a b'"),
    ("fanout", b'{"topic": "officememos", "payload": "a\\u0000b"}', b""),
    ("fanout", json.dumps({"topic": "officememos", "payload": "x" * 1_100_000}).encode(), b"larger than 1 MiB"),
    ("fanout", json.dumps({"topic": "officememos", "payload": 1, "unique": "u" * 256}).encode(), b"invalid unique key"),
    ("subscribe_fanout", b'"bob"', b"must be a mapping"),
    ("subscribe_fanout", b'{"topic": "t"}', b"must have topic and client_id keys"),
    ("subscribe_fanout", b'{"topic": "t", "client_id": null}', b"client_id must be text"),
    ("subscribe_fanout", b'{"topic": "t", "client_id": "\\ud800"}', b"client_id must be text"),
    ("subscribe_fanout", b'{"topic": "t", "client_id": "a b"}', b"invalid client id: 'a b'"),
    ("subscribe_fanout", b'{"topic": "t", "client_id": "b", "ttl": "long"}', b"ttl must be a number"),
    ("subscribe_fanout", b'{"topic": "officememos_a", "client_id": "b"}', b"is taken"),
    ("subscribe_fanout", b'{"topic": "subscribe", "client_id": "fanout"}', b"is a function of the bridge"),
    ("subscribe_fanout", b'{"topic": "unsubscribe", "client_id": "fanout"}', b"is a function of the bridge"),
    ("unsubscribe_fanout", b'{"client_id": "bob"}', b"must have topic and client_id keys"),
]


async def test_bad_jobs_are_refused_with_their_reason_and_publish_nothing(
    url: str, gearmand: Gearmand, caller: Caller, sql: Sql
) -> None:
    async with bridging(url, gearmand):
        await caller.call("subscribe_fanout", BOB.encode())
        await caller.call("subscribe_fanout", b'{"topic": "officememos", "client_id": "a_b"}')
        wrong = []
        for function, arguments, reason in REFUSED:
            kind, text = await caller.call(function, arguments)
            if kind != "refused" or reason not in text or not text:
                wrong.append((function, arguments[:80], kind, text))
        assert wrong == []
        assert await sql.fetchval("select count(*) from penstock.topic_messages") == 0
        assert await sql.fetchval("select array_agg(client_id order by client_id) from penstock.subscriptions") == ["a_b", "bob"]


async def test_unique_coalesces_in_gearmand(url: str, gearmand: Gearmand, inbox: Path, sql: Sql) -> None:
    memo = json.dumps({"topic": "officememos", "payload": "once", "unique": "u", "background": True})
    async with bridging(url, gearmand):
        await gearmand.client("subscribe_fanout", BOB)
        for _ in range(5):
            await gearmand.client("fanout", memo)
        # Jobs that Penstock has not coalesced yet are in gearmand after one wait for their result has timed out.
        given = "select count(*) > 1 and max(attempt) > 1 from penstock.queued_jobs"
        await eventually(lambda: sql.fetchval(given), "the copies to be given to gearmand")
        await eventually(lambda: gearmand.status().get("officememos_bob", [0])[0] == 1, "one job in gearmand")
        worker = gearmand.worker("officememos_bob", "sh", "-c", f"cat >> {inbox}/bob")
        try:
            await eventually(lambda: sql.fetchval("select count(*) = 0 from penstock.queued_jobs"), "all copies to be delivered")
            assert (inbox / "bob").read_text() == "once"
        finally:
            worker.kill()
            worker.communicate()


async def test_what_is_published_in_penstock_reaches_gearman_subscribers_and_the_other_way(url: str, gearmand: Gearmand) -> None:
    async with bridging(url, gearmand):
        app = Penstock(url)
        memos = app.topic("officememos")
        heard: list[Any] = []

        @memos.subscriber("inside")
        async def inside(job: Job[Any]) -> None:
            heard.append(job.data)

        worker = await app.worker()
        working = asyncio.create_task(worker.run())
        await worker.started()
        tool = gearmand.worker("officememos_bob", "tr", "a-z", "A-Z")
        try:
            await gearmand.client("subscribe_fanout", BOB)
            receipt = await memos.publish("go home", background=False)
            assert {o.client_id: o.result for o in receipt.outcomes or []} == {"bob": "GO HOME", "inside": None}
            assert await gearmand.client("fanout", MEMO) == (0, "2")
            assert heard == ["go home", "please go home early today."]
        finally:
            tool.kill()
            tool.communicate()
            worker.stop()
            await working
            await app.close()


async def test_queues_are_exposed_both_ways(url: str, gearmand: Gearmand, caller: Caller) -> None:
    app = Penstock(url)

    @app.job("square", keep_result=True, max_attempts=1)
    async def square(job: Job[int]) -> int:
        return job.data**2

    shout = app.job_type("shout")
    async with app:
        worker = await app.worker()
        working = asyncio.create_task(worker.run())
        await worker.started()
        async with bridging(url, gearmand, expose=["square"], forward=["shout"]):
            assert await gearmand.client("square", "7") == (0, "49")
            kind, text = await caller.call("square", b'"seven"')
            assert (kind, b"unsupported operand" in text or b"valid integer" in text) == ("refused", True)
            receipt = await shout.enqueue("hello")
            tool = gearmand.worker("shout", "tr", "a-z", "A-Z")
            try:
                assert (await app.wait(receipt.id)).status is Status.SUCCEEDED
            finally:
                tool.kill()
                tool.communicate()
        worker.stop()
        await working


async def test_the_bridge_survives_gearmands_restart(url: str, gearmand: Gearmand, inbox: Path) -> None:
    memo = json.dumps({"topic": "officememos", "payload": "kept", "background": True})
    async with bridging(url, gearmand):
        await gearmand.client("subscribe_fanout", BOB)
        await gearmand.client("fanout", memo)
        await eventually(lambda: gearmand.status().get("officememos_bob", [0])[0] == 1, "the job in gearmand")
        gearmand.kill()  # and with it the job, which was in its memory only
        gearmand.start()
        await eventually(lambda: gearmand.workers_of("fanout"), "the return of the bridge")
        worker = gearmand.worker("officememos_bob", "sh", "-c", f"cat >> {inbox}/bob")
        try:
            await eventually(lambda: (inbox / "bob").exists() and (inbox / "bob").read_text() == "kept", "the memo")
            assert await gearmand.client("fanout", MEMO) == (0, "1")
        finally:
            worker.kill()
            worker.communicate()


def start_bridge(url: str, gearmand: Gearmand) -> subprocess.Popen[str]:
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_HEARTBEAT_INTERVAL": "0.5", "PENSTOCK_DEAD_AFTER": "2"}
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "gearman", "--server", f"127.0.0.1:{gearmand.port}", "--timeout", "20"],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


async def test_the_log_of_a_bridge_shows_no_payload(url: str, gearmand: Gearmand, caller: Caller, tmp_path: Path) -> None:
    secret = "s3cret-in-the-payload"
    log = tmp_path / "bridge.log"
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_LOG_LEVEL": "debug"}
    with log.open("wb") as out:
        bridge = subprocess.Popen(
            [
                *(sys.executable, "-m", "penstock", "gearman", "--server", f"127.0.0.1:{gearmand.port}", "--timeout", "20"),
                *("--metrics", ":0", "--log", "json"),
            ],
            env=environment,
            stdout=out,
            stderr=out,
        )
    bad = gearmand.worker("officememos_bob", "sh", "-c", f"echo {secret}; exit 1")
    try:
        await eventually(lambda: gearmand.workers_of("fanout"), "the bridge", 60)
        await caller.call("subscribe_fanout", BOB.encode())
        for refused in (
            f"nonsense {secret}",
            json.dumps({"topic": "a b", "payload": secret}),
            f'{{"payload": "{secret}"}}',
        ):
            assert (await caller.call("fanout", refused.encode()))[0] == "refused"
        memo = json.dumps({"topic": "officememos", "payload": secret})
        assert (await caller.call("fanout", memo.encode()))[0] == "refused"
        (served,) = [line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "metrics_served"]
        metrics = httpx.get(served["url"], timeout=60).text
        assert re.search(r'^penstock_jobs_settled_total\{outcome="failed",type="gearman"\} [1-9]', metrics, re.M), metrics
        assert secret not in metrics
        bad.kill()
        gearmand.kill()
        gearmand.start()
        await eventually(lambda: gearmand.workers_of("fanout"), "the return of the bridge", 60)
    finally:
        bad.kill()
        bad.communicate()
        bridge.send_signal(signal.SIGTERM)
        assert bridge.wait(60) == 0
    said = log.read_text()
    assert "gearman" in said
    assert secret not in said, said


@pytest.mark.chaos
async def test_several_bridges_share_the_work_and_a_killed_one_needs_no_clean_up(
    url: str, gearmand: Gearmand, inbox: Path
) -> None:
    bridges = [start_bridge(url, gearmand) for _ in range(3)]
    tool = gearmand.worker("officememos_bob", "sh", "-c", f"cat >> {inbox}/bob; echo >> {inbox}/bob")
    try:
        await eventually(lambda: gearmand.workers_of("fanout") == 3, "three bridges")
        await gearmand.client("subscribe_fanout", BOB)
        calls = []
        for n in range(60):
            memo = json.dumps({"topic": "officememos", "payload": str(n)})
            calls.append(asyncio.create_task(gearmand.client("fanout", memo)))
            if n in (20, 40):
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                bridges[n // 20].kill()
        answers = await asyncio.gather(*calls)
        assert answers == [(0, "1")] * 60
        got = sorted(int(line) for line in (inbox / "bob").read_text().split())
        # What a killed bridge had given to gearmand may have been done already when another gave it again.
        assert set(got) == set(range(60))
        assert max(Counter(got).values()) <= 3
        bridges[0].send_signal(signal.SIGTERM)
        assert bridges[0].wait(30) == 0
    finally:
        tool.kill()
        tool.communicate()
        for bridge in bridges:
            bridge.kill()
            bridge.communicate()
