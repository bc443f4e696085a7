"""Publish races subscribe, unsubscribe and expiry, from processes that are killed. The history must then keep the promise:
each subscriber received exactly the messages that were published while it was subscribed, in the order of commits, each once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock
from penstock.testing import TemporaryDatabases
from penstock.topics import queries as topics
from tests.chaos.sabotage import Edit, Sabotage
from tests.chaos.seeking import found_out
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
SECONDS = float(os.environ.get("CHAOS_SECONDS", "25")) / 2

# Triggers write these rows, in the transactions that begin and end subscriptions.
LIVES = """
    create table public.lives (topic text, client text, number bigint, began bigint, ended bigint);
    create function begin_life() returns trigger language plpgsql as $$
    begin
        insert into public.lives
        select new.topic, new.client_id, new.number, last_seq from penstock.topics where name = new.topic;
        return null;
    end $$;
    create function end_life() returns trigger language plpgsql as $$
    begin
        update public.lives set ended = (select last_seq from penstock.topics where name = old.topic) where number = old.number;
        return null;
    end $$;
    create trigger begin_life after insert on penstock.subscriptions for each row execute function begin_life();
    create trigger end_life after delete on penstock.subscriptions for each row execute function end_life();
"""


class Crowd:
    """Publishers and subscribers, some of which are killed at random."""

    def __init__(self, url: str, history: Path, chance: random.Random) -> None:
        self._environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "CHAOS_HISTORY": str(history)}
        self._log = history.with_suffix(".log").open("ab")
        self._chance = chance
        self._members = [(role, f"{role[0]}{n}") for role, count in (("publisher", 3), ("subscriber", 5)) for n in range(count)]
        self.processes = [self._start(place) for place in range(len(self._members))]

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.chaos.fanout", *self._members[place], str(self._chance.randrange(10**9))]
        return subprocess.Popen(command, env=self._environment, cwd=Path(__file__).parents[2], stdout=self._log, stderr=self._log)

    def kill_one(self) -> None:
        place = self._chance.randrange(len(self.processes))
        self.processes[place].kill()
        self.processes[place].wait()
        self.processes[place] = self._start(place)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._log.close()


async def race(url: str, sql: Sql, tmp_path: Path, seconds: float) -> tuple[list[dict[str, Any]], int]:
    """Run them, and return the history and the number of kills."""
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    chance = random.Random(seed)
    await sql.execute(LIVES)
    history = tmp_path / "history.jsonl"
    history.touch()
    crowd = Crowd(url, history, chance)
    kills = 0
    try:
        await eventually(lambda: history.read_bytes().count(b'"received"') > 100, "the first messages", timeout=60)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            # Kills come at any moment.
            await asyncio.sleep(chance.uniform(0.3, 1.5))
            crowd.kill_one()
            kills += 1
    finally:
        crowd.stop()
    events = []
    for line in history.read_text("utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events, kills


async def violations(events: list[dict[str, Any]], sql: Sql) -> list[str]:
    """The violations of the promise, as text."""
    found = []
    messages = {str(r["id"]): r for r in await sql.fetch("select id, topic, seq, number from penstock.topic_messages")}
    for event in events:
        if event["kind"] == "published":
            message = messages.get(event["id"])
            if message is None or message["topic"] != event["topic"] or message["seq"] != event.get("seq", message["seq"]):
                found.append(f"{event} was acknowledged, the database has {message}")
        elif event["kind"] == "given up" and event["id"] in messages:
            found.append(f"{event['id']} was rolled back and is there")
    for topic, last_seq in await sql.fetch("select name, last_seq from penstock.topics"):
        seqs = sorted(m["seq"] for m in messages.values() if m["topic"] == topic)
        if seqs != list(range(1, last_seq + 1)):
            found.append(f"the sequence numbers of {topic} are not dense")

    # The copies by subscription, whose number is the end of their ids; with unique keys also those that others coalesced with.
    got: dict[int, Counter[int]] = defaultdict(Counter)
    seq_of = {m["number"]: m["seq"] for m in messages.values()}
    rows = await sql.fetch(
        "select id, message from penstock.queued_jobs union all select id, message from penstock.archived_jobs"
    )
    for row in rows:
        got[int(str(row["id"])[-12:], 16)][seq_of[row["message"]]] += 1
    # A copy that an earlier subscription of the same client left in the queue coalesces too.
    whose = {row["number"]: (row["topic"], row["client"]) for row in await sql.fetch("select * from public.lives")}
    stood_in: dict[Any, set[int]] = defaultdict(set)
    for seq, id in await sql.fetch("select seq, unnest(coalesced) from penstock.topic_messages"):
        stood_in[whose[int(str(id)[-12:], 16)]].add(seq)
    for life in await sql.fetch(
        "select lives.*, coalesce(ended, last_seq) as until from public.lives join penstock.topics on name = topic"
    ):
        number = life["number"]
        if double := [seq for seq, copies in got[number].items() if copies > 1]:
            found.append(f"subscription {number} got {double[:5]} more than once")
        expected = set(range(life["began"] + 1, life["until"] + 1))
        missing = expected - got[number].keys() - stood_in[whose[number]]
        if missing:
            found.append(f"subscription {number} to {life['topic']} missed {sorted(missing)[:5]} of {len(expected)}")
        if extra := got[number].keys() - expected:
            found.append(f"subscription {number} to {life['topic']} got {sorted(extra)[:5]} outside of its time")
    for number in got.keys() - whose.keys():
        found.append(f"subscription {number} got messages and never was")
    return found


@pytest.mark.chaos
async def test_each_subscriber_gets_exactly_what_was_published_in_its_time(url: str, sql: Sql, tmp_path: Path) -> None:
    events, kills = await race(url, sql, tmp_path, SECONDS)
    found = await violations(events, sql)
    assert found == [], "\n".join(found[:20])
    lives = await sql.fetch("select * from public.lives")
    ended = [life for life in lives if life["ended"] is not None]
    received = Counter(event["job"] for event in events if event["kind"] == "received")
    assert kills >= 5
    assert len(ended) > 20, "too few subscriptions ended"
    settled = await sql.fetch("select id from penstock.archived_jobs where status = 'succeeded'")
    assert {str(row["id"]) for row in settled} <= received.keys()
    app = Penstock(url)
    await sql.execute("update penstock.subscriptions set expires_at = now(), ttl = '1 microsecond' where ttl is not null")
    await sql.execute("update penstock.ended_queues set look_at = now()")
    ended_now, _ = await topics.maintain(await app.database())
    assert ended_now > 0
    await app.close()
    print(f"{len(events)} events, {kills} killed, {len(lives)} subscriptions, {len(settled)} copies settled")


OUTSIDE = r"subscription \d+ to \S+ (missed|got) "
SABOTAGE = {
    "subscribing without the topic's lock": Sabotage(
        OUTSIDE,
        (
            Edit(
                "subscribe_many",
                r"topic := penstock\.lock_topic\(p_topic\);",
                # The time in which a message that others publish is missed.
                "select * into topic from penstock.topics where name = p_topic; perform pg_sleep(0.02);",
            ),
        ),
    ),
    "going by the clock instead of ending what is over": Sabotage(
        OUTSIDE,
        (
            Edit(
                "insert_copies",
                r"where subscriber\.topic = p_topic",
                r"\g<0> and coalesce(subscriber.expires_at > p_moment + interval '0.9 s', true)",
            ),
        ),
    ),
}


@pytest.mark.chaos
@pytest.mark.parametrize("sabotage", SABOTAGE.values(), ids=SABOTAGE)
async def test_the_checker_finds_a_broken_publish(databases: TemporaryDatabases, tmp_path: Path, sabotage: Sabotage) -> None:
    async def run(folder: Path) -> list[str]:
        with databases.database() as url:
            sql = await asyncpg.connect(url)
            try:
                async with Penstock(url) as app:
                    await sabotage.prepare(app)
                events, _ = await race(url, sql, folder, 5)
                return await violations(events, sql)
            finally:
                sql.terminate()

    await found_out(sabotage.expected, tmp_path, run)
