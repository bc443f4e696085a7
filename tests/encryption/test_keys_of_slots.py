"""Work in slots that needs a key of encryption: the slot goes to a member that has the key."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg

from penstock import Batch, Job, Penstock, Settings, Standing, Status
from penstock.core.encryption import Keyring, new_key
from penstock.groups import queries as ownership
from penstock.groups.assignors import Candidate, KeyAssign
from penstock.testing import running_worker
from penstock.worker.doctor import examine
from penstock.worker.findings import Finding
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
TIMEOUT = timedelta(seconds=60)
KEYS_OF_JOBS = [f"tenant-{n}" for n in range(24)]


def declared(url: str, keys: Sequence[str], assign: KeyAssign | None = None) -> Penstock:
    """An application whose pool notes in its results who ran a job."""
    settings = Settings(heartbeat_interval=timedelta(seconds=0.3), poll_interval=timedelta(seconds=0.5))
    app = Penstock(url, keys=list(keys), settings=settings)
    ledger = app.pool("ledger", encrypted=True, keep_result=True, slots=8, assign=assign)

    @ledger.job
    async def book(job: Job[Any]) -> list[str]:
        return list(app.context.keyring.ids)

    @ledger.standing
    async def tenant(job: Standing[Any]) -> AsyncIterator[None]:
        await job.save({"keys": list(app.context.keyring.ids)})
        yield

    return app


async def enqueued(url: str, key: str, keys: Sequence[str] = KEYS_OF_JOBS) -> list[Any]:
    """Jobs that are encrypted with a key."""
    async with declared(url, [key]) as app:
        return [await app.enqueue("ledger", {}, key=each) for each in keys]


@asynccontextmanager
async def worker(url: str, keys: Sequence[str], assign: KeyAssign | None = None) -> AsyncIterator[Penstock]:
    async with declared(url, keys, assign) as app, running_worker(app):
        yield app


@contextmanager
def process(url: str, keys: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process of its own."""
    command = [sys.executable, "-m", "penstock", "worker", "tests.encryption.holding_app:app"]
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_KEYS": ",".join(keys)}
    started = subprocess.Popen(command, env=environment)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def id_of(key: str) -> str:
    return Keyring([key]).ids[0]


async def owned(sql: Sql, members: int) -> dict[int, str]:
    """The owner of each slot, once all have their share and none moves."""

    async def settled() -> dict[int, str]:
        rows = await sql.fetch("select slot, owner, target from penstock.slots where group_name = 'ledger' and owner = target")
        count = await sql.fetchval("select count(*) from penstock.members where group_name = 'ledger'")
        return {row["slot"]: row["owner"] for row in rows} if len(rows) == 8 and count == members else {}

    return await eventually(settled, "the owners of all slots")


async def locked(app: Penstock) -> list[Finding]:
    return [one for one in await examine(await app.database()) if one.check == "keys" and one.level != "ok"]


async def test_slots_go_to_the_member_that_has_the_key_and_no_other_slot_moves(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()
    async with worker(url, [new]) as lacking, worker(url, [new, old]):
        before = await owned(sql, 2)
        assert sorted(list(before.values()).count(one) for one in set(before.values())) == [4, 4]
        member = {
            row["key_ids"][-1]: row["id"]
            for row in await sql.fetch("select id, key_ids from penstock.members where group_name = 'ledger'")
        }
        assert member.keys() == {id_of(old), id_of(new)}
        slots = {each: await sql.fetchval("select penstock.slot_of($1, 8)", each) for each in KEYS_OF_JOBS}
        key = next(each for each in KEYS_OF_JOBS if before[slots[each]] == member[id_of(new)])
        needing = slots[key]
        (job,) = await enqueued(url, old, [key])
        done = await lacking.wait(job.id, timeout=TIMEOUT)
        assert (done.status, done.attempt) == (Status.SUCCEEDED, 1), "no attempt is used up"
        after = await owned(sql, 2)
        assert {slot: owner for slot, owner in after.items() if before[slot] != owner} == {needing: member[id_of(old)]}
        # What others are encrypted with does not matter there, and it stays.
        (plain,) = await enqueued(url, new, [key])
        assert (await lacking.wait(plain.id, timeout=TIMEOUT)).status is Status.SUCCEEDED
        assert await owned(sql, 2) == after


async def test_jobs_run_without_a_hand_when_a_member_with_the_key_appears_and_until_then_why_and_doctor_name_the_key(
    url: str, sql: Sql
) -> None:
    old, new = new_key(), new_key()
    async with worker(url, [new]) as lacking:
        await owned(sql, 1)
        jobs = await enqueued(url, old)
        behind = (await enqueued(url, new, KEYS_OF_JOBS[:1]))[0]
        (problem,) = await eventually(lambda: locked(lacking), "what doctor says")
        assert problem.level == "problem" and id_of(old) in problem.message and "what is encrypted waits" in problem.message
        why = await lacking.why(jobs[0].id)
        assert (why.reason, why.by_job) == ("no-key", None)
        assert id_of(old) in why.message and "no worker of the pool has it" in why.message
        why = await lacking.why(behind.id)
        assert (why.reason, why.by_job) == ("no-key", jobs[0].id)
        async with worker(url, [new, old]):
            for job in [*jobs, behind]:
                assert (await lacking.wait(job.id, timeout=TIMEOUT)).status is Status.SUCCEEDED
            results = [(await lacking.find(job.id)).result for job in jobs]
            assert results == [[id_of(new), id_of(old)]] * len(jobs)
            await eventually(lambda: without(lacking), "that doctor finds no problem")


async def without(app: Penstock) -> bool:
    return not [one for one in await locked(app) if one.level == "problem"]


async def test_jobs_wait_for_no_one_when_the_holder_of_the_key_is_killed_and_another_one_comes(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()
    async with worker(url, [new]) as lacking:
        with process(url, [new, old]) as first:
            await owned(sql, 2)
            for job in await enqueued(url, old):
                assert (await lacking.wait(job.id, timeout=TIMEOUT)).result in (first.pid, [id_of(new), id_of(old)])
            first.send_signal(signal.SIGKILL)
            jobs = await enqueued(url, old)
            await owned(sql, 1)
            assert (await lacking.why(jobs[0].id)).reason == "no-key"
        with process(url, [new, old]) as second:
            for job in jobs:
                assert (await lacking.wait(job.id, timeout=TIMEOUT)).result == second.pid


async def test_members_of_which_none_has_all_keys_take_turns_with_a_slot(url: str, sql: Sql) -> None:
    first, second = new_key(), new_key()
    async with worker(url, [first]) as app, worker(url, [second]):
        await owned(sql, 2)
        jobs = [await enqueued(url, key) for key in (first, second, first)]
        for job in [each for some in jobs for each in some]:
            assert (await app.wait(job.id, timeout=TIMEOUT)).status is Status.SUCCEEDED


async def test_a_rule_of_the_application_is_asked_with_the_members_that_have_the_key(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()

    def youngest(key: str, workers: Sequence[Candidate]) -> int:
        return len(workers) - 1

    async with worker(url, [new, old], youngest) as app, worker(url, [new], youngest):
        jobs = await enqueued_with(url, old, youngest)
        others = await enqueued_with(url, new, youngest, "other")
        for job in jobs:
            assert (await app.wait(job.id, timeout=TIMEOUT)).result == [id_of(new), id_of(old)]
        for job in others:
            assert (await app.wait(job.id, timeout=TIMEOUT)).result == [id_of(new)]


async def enqueued_with(url: str, key: str, assign: KeyAssign, prefix: str = "tenant") -> list[Any]:
    async with declared(url, [key], assign) as app:
        return [await app.enqueue("ledger", {}, key=f"{prefix}-{n}") for n in range(6)]


async def test_a_standing_job_goes_to_the_member_that_has_its_key(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()
    async with declared(url, [old]) as app:
        ledger = await app.find_pool("ledger")
        for key in KEYS_OF_JOBS:
            await ledger.start(key, {"of": key})
    async with worker(url, [new]), worker(url, [new, old]) as holder:
        ledger = await holder.find_pool("ledger")

        async def all_run() -> bool:
            return all(job.state == {"keys": [id_of(new), id_of(old)]} for job in await ledger.standing_jobs())

        await eventually(all_run, "that all standing jobs run")


async def test_partitions_go_to_the_member_of_the_group_that_has_the_key_of_their_events(url: str, sql: Sql) -> None:
    old, new = new_key(), new_key()
    got: list[int] = []

    def consuming(keys: Sequence[str]) -> Penstock:
        app = Penstock(url, keys=list(keys), settings=Settings(heartbeat_interval=timedelta(seconds=0.3)))
        orders = app.stream("orders", encrypted=True, partitions=4)

        @orders.consumer(group="billing")
        async def bill(batch: Batch[Any]) -> None:
            got.extend(record["n"] for record in batch.records())

        return app

    async with consuming([old]) as app:
        orders = await app.find_stream("orders")
        for n in range(16):
            await orders.append({"n": n}, key=f"tenant-{n}")
    async with consuming([new]) as lacking, running_worker(lacking):
        await eventually(lambda: locked(lacking), "what doctor says")
        async with consuming([new, old]) as holder, running_worker(holder):
            await eventually(lambda: asyncio.sleep(0, set(got) == set(range(16))), "all events")


async def test_an_owner_says_once_what_it_lacks_and_says_it_only_of_its_own_slots(url: str, sql: Sql) -> None:
    async with declared(url, [new_key()]) as app:
        database = await app.database()
        await sql.execute("select penstock.join_group('ledger', 'a', gen_random_uuid(), p_key_ids => '{AAAAAAAA}')")
        await sql.execute(
            "update penstock.slots set owner = case when slot < 4 then 'a' else 'b' end where group_name = 'ledger'"
        )
        for lacking, news in (
            ([(0, "BBBBBBBB")], True),
            ([(0, "BBBBBBBB")], False),
            ([(0, "BBBBBBBB"), (0, "CCCCCCCC")], True),
            ([(0, "CCCCCCCC")], True),
            ([(0, "CCCCCCCC"), (1, "CCCCCCCC")], True),
            ([(7, "BBBBBBBB")], False),
        ):
            async with database.transaction() as transaction:
                assert (await ownership.need_keys(transaction, "ledger", "a", lacking) is not None) is news, lacking
        seen = {slot.slot: list(slot.key_ids) for slot in await ownership.slots(database, "ledger") if slot.key_ids}
        assert seen == {0: ["CCCCCCCC", "BBBBBBBB"], 1: ["CCCCCCCC"]}
        # Forgotten after an hour, unless it is said again.
        await sql.execute("update penstock.slots set needed_at = needed_at - interval '1 hour' where slot = 0")
        assert [slot.slot for slot in await ownership.slots(database, "ledger") if slot.key_ids] == [1]
        for bad in ("no key id", None):
            try:
                await sql.execute("select penstock.need_keys('ledger', 'a', array[0], array[$1]::text[])", bad)
            except asyncpg.PostgresError as error:
                assert error.sqlstate == "PS400"
            else:
                raise AssertionError(bad)
