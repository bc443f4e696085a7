"""Why a job waits: one answer for each thing that can hold it, in SQL, Python, HTTP and on the command line."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Backoff, Event, Job, NewJob, NotFound, OnFailure, Penstock, RateLimit, Why
from penstock.core.encryption import Keyring, new_key
from penstock.testing import consumed, running_worker
from tests.command_line import penstock
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
HOUR = timedelta(hours=1)


@asynccontextmanager
async def registered(sql: Sql, *names: str) -> AsyncIterator[None]:
    """A live worker that never claims anything."""
    await sql.execute("select penstock.register_worker('idle', $1)", list(names))
    yield


def shown(why: Why) -> dict[str, Any]:
    """What is known, without times."""
    values = {name: getattr(why, name) for name in ("reason", "by_job", "worker", "used", "most", "ahead")}
    return {name: value for name, value in values.items() if value is not None}


async def test_a_job_without_a_worker(app: Penstock) -> None:
    await app.create_job_type("mail")
    receipt = await app.enqueue("mail", expires_at=HOUR)
    why = await app.why(receipt.id)
    assert shown(why) == {"reason": "no-worker"}
    assert "penstock worker" in why.message
    assert why.expires_at is not None and "expires" in str(why)
    with pytest.raises(NotFound):
        await app.why("019a0000-0000-7000-8000-000000000000")


async def test_who_waits_in_vain_for_a_job_is_told_what_to_look_at(app: Penstock) -> None:
    await app.create_job_type("mail")
    receipt = await app.enqueue("mail")
    with pytest.raises(TimeoutError) as raised:
        await app.wait(receipt.id, timeout=timedelta(seconds=0.2))
    assert f"job {receipt.id} has not finished within 0:00:00.2" in str(raised.value)
    assert f"penstock jobs show {receipt.id}" in str(raised.value)


async def test_a_job_whose_key_no_worker_has(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail", encrypted=True)
    sealed = Keyring([new_key()])
    id = await sql.fetchval("select penstock.enqueue('mail', $1)", sealed.seal("{}", b"mail"))
    async with registered(sql, "mail"):
        for keys in ("{}", "{AAAAAAAA}"):
            await sql.execute("select penstock.note_keys('idle', $1::text::text[], '{}')", keys)
            why = await app.why(id)
            assert shown(why) == {"reason": "no-key"}
            assert sealed.ids[0] in why.message and "PENSTOCK_KEYS" in why.message
        await sql.execute("select penstock.note_keys('idle', $1, '{}')", sealed.ids)
        assert shown(await app.why(id)) == {"reason": "ready", "ahead": 0}


async def test_deferred_paused_and_behind_others(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    first, second, later = [
        (await app.enqueue("mail", run_after=after)).id for after in (None, None, HOUR)
    ]  # fmt: skip
    urgent = (await app.enqueue("mail", priority=-1)).id
    async with registered(sql, "mail"):
        assert [shown(await app.why(id)) for id in (urgent, first, second)] == [
            {"reason": "ready", "ahead": 0},
            {"reason": "behind", "ahead": 1},
            {"reason": "behind", "ahead": 2},
        ]
        why = await app.why(later)
        assert why.reason == "deferred" and why.until is not None
        await app.pause("mail")
        why = await app.why(first)
        assert why.reason == "paused" and why.since is not None
        assert (await app.why(later)).reason == "deferred"


async def test_the_limits_of_a_type(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("few", concurrency=2)
    await app.create_job_type("slow", rate_limit=2, rate_period="1 hour")
    async with registered(sql, "few", "slow"):
        for name in ("few", "slow"):
            ids = [receipt.id for receipt in await app.enqueue_many(name, [{}] * 3)]
            claimed = await sql.fetch("select id from penstock.claim('w', $1, 10)", [name])
            assert {row["id"] for row in claimed} == set(ids[:2])
            assert shown(await app.why(ids[0])) == {"reason": "running", "worker": "w"}
            why = await app.why(ids[2])
            if name == "few":
                assert shown(why) == {"reason": "concurrency", "used": 2, "most": 2}
            else:
                assert shown(why) == {"reason": "rate", "most": 2}
                assert why.until is not None


async def test_a_suspect_waits_to_run_alone(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    id = (await app.enqueue("mail")).id
    await sql.execute(
        "update penstock.queued_jobs set crashes = 2, run_after = penstock.isolation_time(), seq = null where id = $1", id
    )
    async with registered(sql, "mail"):
        assert shown(await app.why(id)) == {"reason": "alone"}


async def test_a_job_that_is_claimed_ahead_waits_for_its_key(url: str, sql: Sql) -> None:
    app = Penstock(url)
    pool = app.pool("ledger", payload=str, slots=1)
    async with app:
        first, second, third = [(await pool.enqueue("bolt", "y")).id for _ in range(3)]
        await sql.execute("select penstock.join_group('ledger', 'm', gen_random_uuid())")
        await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")
        await sql.fetch("select * from penstock.claim_keys('m', 'ledger', '{0}', '{1}', 10, 3)")
        assert (await app.why(first)).reason == "running"
        for waiting, ahead in ((second, 1), (third, 2)):
            why = await app.why(waiting)
            assert shown(why) == {"reason": "key-busy", "by_job": first, "worker": "m", "ahead": ahead}
            assert "claimed" in why.message
        state = await sql.fetchrow("select * from penstock.key_state('ledger', 'bolt')")
        assert (state["next_job"], state["reason"], state["by_job"]) == (second, "key-busy", first)


async def test_a_paused_key_holds_its_jobs(app: Penstock) -> None:
    pool = app.pool("ledger")
    id = (await pool.enqueue("acme", 1)).id
    since = await pool.pause_key("acme")
    why = await app.why(id)
    assert shown(why) == {"reason": "paused-key"}
    assert why.since == since


async def test_a_retry_and_the_key_that_it_holds(url: str, sql: Sql) -> None:
    app = Penstock(url)
    pool = app.pool("ledger", payload=str, max_attempts=3, backoff=Backoff(base=HOUR))
    release = asyncio.Event()

    @pool.job
    async def work(job: Job[str]) -> None:
        if job.data == "fails":
            raise ValueError("no")
        await release.wait()

    async with app:
        failing, behind = [(await pool.enqueue("acme", data)).id for data in ("fails", "x")]
        assert shown(await app.why(behind)) == {"reason": "no-worker"}
        async with running_worker(app) as worker:
            busy, next_one = [(await pool.enqueue("bolt", "y")).id for _ in range(2)]
            await eventually(lambda: has(app, failing, "retry"))
            await eventually(lambda: has(app, busy, "running"))
            why = await app.why(behind)
            assert shown(why) == {"reason": "key-retry", "by_job": failing, "ahead": 1}
            assert why.until == (await app.why(failing)).until
            assert "attempt 2 of 3" in why.message
            held = await app.why(next_one)
            member = await sql.fetchval("select id from penstock.members where group_name = 'ledger'")
            assert shown(held) == {"reason": "key-busy", "by_job": busy, "worker": member, "ahead": 1}
            assert held.since is not None
            # The key says the same.
            state = await sql.fetchrow("select * from penstock.key_state('ledger', 'acme')")
            assert (state["ready"], state["next_job"], state["reason"]) == (2, failing, "retry")
            state = await sql.fetchrow("select * from penstock.key_state('ledger', 'bolt')")
            assert (state["next_job"], state["reason"], state["by_job"]) == (next_one, "key-busy", busy)
            assert (await sql.fetchrow("select * from penstock.key_state('ledger', 'nobody')"))["reason"] is None
            release.set()
            assert worker is not None
            await eventually(lambda: has(app, next_one, "finished"))
    shown_key = command(url, "pools", "key", "ledger", "acme")
    assert f"job {failing} waits: Attempt 1 of 3 failed" in shown_key.replace("\n", " ")
    assert "waits" in command(url, "jobs", "show", str(behind))
    assert json.loads(command(url, "jobs", "show", str(behind), "--json"))["why"]["reason"] in ("no-worker", "key-retry")


async def has(app: Penstock, id: Any, reason: str) -> bool:
    return (await app.why(id)).reason == reason


def command(url: str, *arguments: str) -> str:
    done = penstock(url, *arguments, COLUMNS="400")
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_key_that_the_rule_cannot_place(url: str) -> None:
    app = Penstock(url)

    def rule(key: str, workers: Any) -> int | None:
        if key == "bad":
            raise KeyError(key)
        return None if key == "nobody" else 0

    pool = app.pool("requests", assign=rule)

    @pool.job
    async def work(job: Job[Any]) -> None: ...

    async with app, running_worker(app):
        bad, unplaced = [(await pool.enqueue(key)).id for key in ("bad", "nobody")]
        await eventually(lambda: has(app, bad, "quarantined-key"))
        await eventually(lambda: has(app, unplaced, "unplaced"))
        assert "KeyError" in (await app.why(bad)).message


async def test_limits_of_a_key(url: str) -> None:
    app = Penstock(url)
    pool = app.pool("calls", key_rate=RateLimit(1, HOUR))

    @pool.job
    async def work(job: Job[Any]) -> None: ...

    async with app, running_worker(app):
        ids = [receipt.id for receipt in await pool.enqueue_many([NewJob({}, key="acme"), NewJob({}, key="acme")])]
        await eventually(lambda: has(app, ids[0], "finished"))
        why = await app.why(ids[1])
        assert shown(why) == {"reason": "key-rate", "used": 1, "most": 1, "ahead": 0}
        assert why.until is not None


async def test_expired_just_due_and_paused_by_a_limit_of_none(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    expired, due = (await app.enqueue("mail")).id, (await app.enqueue("mail")).id
    await sql.execute("update penstock.queued_jobs set expires_at = now() - interval '1 second' where id = $1", expired)
    await sql.execute("update penstock.queued_jobs set run_after = now() - interval '1 second', seq = null where id = $1", due)
    async with registered(sql, "mail"):
        why = await app.why(expired)
        assert shown(why) == {"reason": "expired"}
        assert why.until is not None and why.until == why.expires_at
        why = await app.why(due)
        assert shown(why) == {"reason": "ready"}
        assert "just come" in why.message
        await app.change_job_type("mail", concurrency=0)
        why = await app.why(due)
        assert (shown(why), why.since) == ({"reason": "paused"}, None)


async def test_what_holds_a_key_apart_from_a_retry(app: Penstock, sql: Sql) -> None:
    pool, wide = app.pool("ledger"), app.pool("wide", key_concurrency=2)
    first, second = [(await pool.enqueue("acme")).id for _ in range(2)]
    several = [(await wide.enqueue("acme")).id for _ in range(3)]
    for name in ("ledger", "wide"):
        await sql.execute("select penstock.join_group($1, 'm', gen_random_uuid(), '1 hour', '{}')", name)
    await sql.execute("update penstock.slots set owner = 'm', target = 'other'")
    assert shown(await app.why(second)) == {"reason": "moving", "worker": "m"}
    assert (await app.why(second)).message == "Its key moves from m to other."
    await sql.execute("update penstock.slots set owner = null")
    assert shown(await app.why(second)) == {"reason": "moving"}
    await sql.execute("update penstock.slots set owner = 'm', target = 'm'")
    assert shown(await app.why(second)) == {"reason": "behind", "ahead": 1}
    await sql.execute("update penstock.queued_jobs set crashes = 2, run_after = penstock.isolation_time() where id = $1", first)
    assert shown(await app.why(second)) == {"reason": "key-alone", "by_job": first, "ahead": 1}
    assert shown(await app.why(first)) == {"reason": "alone", "ahead": 0}
    await sql.execute("update penstock.queued_jobs set status = 'in-progress' where id = any ($1)", several[:2])
    assert shown(await app.why(several[2])) == {"reason": "key-busy", "used": 2, "most": 2, "ahead": 2}


async def test_every_reason_has_a_test_and_stands_in_the_contract(sql: Sql) -> None:
    sources = await sql.fetchval(
        "select string_agg(prosrc, '') from pg_proc"
        " where pronamespace = 'penstock'::regnamespace and proname in ('why', 'why_of')"
    )
    given = set(re.findall(r"(?:reason := |then |else )'([a-z-]+)'(?: else '([a-z-]+)' end)?;", sources))
    reasons = {reason for pair in given for reason in pair if reason} | {"finished"}
    reasons |= {
        word for line in re.findall(r"reason := case[^;]*;", sources) for word in re.findall(r"(?:then|else) '([a-z-]+)'", line)
    }
    assert {"running", "deferred", "retry", "behind", "key-alone"} <= reasons
    contract = await sql.fetchval("select obj_description('penstock.why(uuid)'::regprocedure)")
    others = (
        "worker/test_snoozing.py",
        "workflows/test_waits.py",
        "workflows/test_gathering.py",
        "workflows/test_suspended_jobs.py",
    )
    beside = [Path(__file__).parents[1] / name for name in others]
    tests = "".join(path.read_text() for path in (Path(__file__), *beside))
    assert {reason for reason in reasons if reason not in contract} == set()
    tested = set(
        re.findall(r'"reason": "([a-z-]+)"|reason == "([a-z-]+)"|(?:has|_is|_waits_for)\(app, [^"]*, "([a-z-]+)"\)', tests)
    )
    assert reasons - {word for found in tested for word in found} == set()


async def test_the_look_is_bounded_and_uses_indexes(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    await app.enqueue_many("mail", [{}] * 3000)
    last = (await app.enqueue("mail")).id
    await sql.execute("analyze penstock.queued_jobs")
    async with registered(sql, "mail"):
        assert shown(await app.why(last)) == {"reason": "behind", "ahead": 1000}
        # What was read of the table: bounded, whatever waits.
        async with sql.transaction():
            await sql.fetch("select * from penstock.why($1)", last)
            read = await sql.fetchrow(
                "select seq_scan, idx_tup_fetch from pg_stat_xact_user_tables where relname = 'queued_jobs'"
            )
        assert read["seq_scan"] == 0
        assert read["idx_tup_fetch"] < 1100


async def test_a_reader_may_ask(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    id = (await app.enqueue("mail")).id
    role = "asks_" + str(await sql.fetchval("select current_database()"))[-12:]
    await sql.execute(f"create role {role}")
    try:
        await sql.execute(f"select penstock.grant_access('{role}', 'reader')")
        await sql.execute(f"set role {role}")
        assert await sql.fetchval("select reason from penstock.why($1)", id) == "no-worker"
        await sql.execute("reset role")
    finally:
        await sql.execute(f"reset role; drop owned by {role}; drop role {role}")


async def test_a_handler_that_keeps_failing_is_seen_in_the_lag(url: str, sql: Sql) -> None:
    app = Penstock(url)
    orders = app.stream("orders", int, partitions=1)
    mended = False

    @orders.consumer(group="billing", on_failure=OnFailure(backoff=Backoff(base=timedelta(seconds=0.1), factor=1)))
    async def bill(event: Event[int]) -> None:
        if event.data == 13 and not mended:
            raise ConnectionError("the bank does not answer")

    async with app:
        await orders.append_many([1, 13, 2])
        async with running_worker(app):

            async def failing() -> Any:
                lags = await orders.lag("billing") if await groups(sql) else []
                return lags[0] if lags and lags[0].failing_since is not None else None

            first = await eventually(failing, "the note of a failure")
            assert (first.failing_offset, first.failing_error) == (1, "ConnectionError: the bank does not answer")

            async def later() -> Any:
                found = await failing()
                return found if found.failing_attempt > first.failing_attempt else None

            again = await eventually(later, "a later note")
            assert again.failing_since == first.failing_since
            table = await asyncio.to_thread(command, url, "streams", "lag", "orders")
            assert "partition 0 fails at 1 since" in table and "ConnectionError: the bank does not answer" in table
            mended = True
            await consumed(orders, "billing")
        [lag] = await orders.lag("billing")
        assert (lag.next, lag.failing_since, lag.failing_offset, lag.failing_attempt, lag.failing_error) == (3, *[None] * 4)


async def groups(sql: Sql) -> bool:
    return bool(await sql.fetchval("select exists (select from penstock.stream_groups)"))


async def test_consumed_waits_for_a_group_that_comes_and_says_why_one_stands_still(url: str) -> None:
    app = Penstock(url)
    orders = app.stream("orders", int, partitions=1)
    soon = timedelta(milliseconds=1)

    @orders.consumer(group="billing")
    async def bill(event: Event[int]) -> None:
        raise ConnectionError("the bank does not answer")

    async with app:
        await orders.append(1)
        with pytest.raises(NotFound, match="no consumer group billing"):
            await consumed(orders, "billing", timeout=soon)
        async with running_worker(app):
            with pytest.raises(NotFound):
                await consumed(orders, "nobody", timeout=soon)

            async def failing() -> bool:
                try:
                    return (await orders.lag("billing"))[0].failing_since is not None
                except NotFound:
                    return False

            await eventually(failing, "the note of a failure")
            with pytest.raises(TimeoutError, match="partition 0 at 0 of 1 .ConnectionError: the bank"):
                await consumed(orders, "billing", timeout=soon)
