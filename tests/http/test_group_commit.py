"""Group commit: what comes together is committed together, and each gets its own outcome."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest

from penstock import DatabaseUnavailable, InvalidInput, NotFound
from penstock.core.coalescing import GroupCommit
from tests.http.http_server import TOKEN, Served, serving

AUTH = httpx.BasicAuth("admin", TOKEN)


class Store:
    """Doubles numbers, refuses negative ones with all that came with them, and says what came together."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def commit(self, key: str, numbers: list[int]) -> list[int]:
        self.batches.append(numbers)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        if any(number < 0 for number in numbers):
            raise InvalidInput(f"negative: {numbers}")
        return [2 * number for number in numbers]


async def submit(group: GroupCommit[str, int, int], numbers: list[int], key: str = "a") -> list[Any]:
    return await asyncio.gather(*(group.submit(key, number) for number in numbers), return_exceptions=True)


async def test_what_comes_while_a_batch_is_under_way_is_the_next_batch() -> None:
    store = Store()
    group: GroupCommit[str, int, int] = GroupCommit(store.commit)
    store.gate.clear()
    first = asyncio.create_task(submit(group, [1]))
    while not store.batches:
        await asyncio.sleep(0)
    second = asyncio.create_task(submit(group, [2, 3, 4]))
    await asyncio.sleep(0)
    store.gate.set()
    assert (await first, await second) == ([2], [4, 6, 8])
    assert store.batches == [[1], [2, 3, 4]]


async def test_a_bad_one_does_not_fail_the_others() -> None:
    store = Store()
    group: GroupCommit[str, int, int] = GroupCommit(store.commit)
    outcomes = await submit(group, [1, 2, -3, 4, 5, -6, 7])
    assert [str(outcome) if isinstance(outcome, Exception) else outcome for outcome in outcomes] == [
        2, 4, "negative: [-3]", 8, 10, "negative: [-6]", 14,
    ]  # fmt: skip


@pytest.mark.parametrize("error", [NotFound("no such type"), DatabaseUnavailable("away"), ValueError("a bug")])
async def test_an_error_of_all_is_not_tried_one_by_one(error: Exception) -> None:
    store = Store()
    store.error = error
    group: GroupCommit[str, int, int] = GroupCommit(store.commit)
    assert await submit(group, [1, 2, 3, 4]) == [error] * 4
    assert len(store.batches) <= 2
    store.error = None
    assert await submit(group, [5]) == [10]


async def test_batches_have_an_end_and_keys_are_apart() -> None:
    store = Store()
    group: GroupCommit[str, int, int] = GroupCommit(store.commit, most=2)
    await asyncio.gather(submit(group, [1, 2, 3], "a"), submit(group, [4], "b"))
    assert sorted(store.batches) == [[1, 2], [3], [4]]


async def test_the_same_twice_is_in_two_batches() -> None:
    store = Store()
    group: GroupCommit[str, int, int] = GroupCommit(store.commit, identity=lambda number: number)
    assert await submit(group, [1, 2, 1, 1]) == [2, 4, 2, 2]
    assert store.batches == [[1, 2], [1], [1]]


async def test_a_caller_that_goes_away_does_not_hold_up_the_others() -> None:
    store = Store()
    group: GroupCommit[str, int, int] = GroupCommit(store.commit)
    store.gate.clear()
    gone, stays = asyncio.create_task(group.submit("a", 1)), asyncio.create_task(group.submit("a", 2))
    while not store.batches:
        await asyncio.sleep(0)
    gone.cancel()
    store.gate.set()
    assert await stays == 4


async def test_concurrent_requests_each_get_their_own_answer(served: Served, echo: str) -> None:
    """Good, repeated, too large, unstorable, of no type, all at once, over a socket each."""
    same = f"job_{uuid4()}"
    kinds = {
        "good": (echo, None, {"data": 1}, 202),
        "same": (echo, same, {"data": 1}, 202),
        "unstorable": (echo, None, {"data": "\x00"}, 400),
        "key": (echo, None, {"data": 1, "key": "\n"}, 400),
        "no type": ("nope", None, {"data": 1}, 404),
        "unique": (echo, None, {"data": 1, "unique": "u"}, 202),
    }
    async with httpx.AsyncClient(base_url=served.base_url, auth=AUTH, timeout=60) as client:

        async def put(kind: str) -> tuple[str, int, Any]:
            name, id, body, _ = kinds[kind]
            response = await client.put(f"/v1/jobs/{name}/{id or f'job_{uuid4()}'}", json=body)
            return kind, response.status_code, response.json().get("id")

        answers = await asyncio.gather(*(put(kind) for _ in range(15) for kind in kinds))
        assert {(kind, status) for kind, status, _ in answers} == {(kind, expected[3]) for kind, expected in kinds.items()}
        assert {id for kind, _, id in answers if kind == "same"} == {same}
        assert len({id for kind, _, id in answers if kind == "unique"}) == 1
        assert len({id for kind, _, id in answers if kind == "good"}) == 15
        assert (await client.get(f"/v1/jobs/{echo}/stats")).json()["ready"] == 15 + 1 + 1


async def test_the_same_ids_at_the_same_time_in_several_processes(url: str) -> None:
    """Batches of two processes that have the same ids in other orders would wait for each other both ways: a deadlock."""
    with serving(url, "--processes", "2") as served, served.client() as client:
        body = {"name": "echo", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
        assert client.post("/v1/jobs", json=body).status_code == 201
        ids = [f"job_{uuid4()}" for _ in range(60)]
        unique = {id: f"unique-{n % 20}" for n, id in enumerate(ids)}

        async def put_all(seed: int) -> list[int]:
            order = random.Random(seed).sample(ids, len(ids))
            limits = httpx.Limits(max_connections=len(ids))
            async with httpx.AsyncClient(base_url=served.base_url, auth=AUTH, timeout=60, limits=limits) as own:
                calls = [own.put(f"/v1/jobs/echo/{id}", json={"data": 1, "unique": unique[id]}) for id in order]
                return [answer.status_code for answer in await asyncio.gather(*calls)]

        answers = await asyncio.gather(*(put_all(seed) for seed in range(4)))
        assert {status for statuses in answers for status in statuses} == {202}
        assert client.get("/v1/jobs/echo/stats").json()["ready"] == 20
        sql = await asyncpg.connect(url)
        try:
            assert await sql.fetchval("select deadlocks from pg_stat_database where datname = current_database()") == 0
        finally:
            await sql.close()


async def test_concurrent_callbacks_each_get_their_own_answer(served: Served, echo: str) -> None:
    async with httpx.AsyncClient(base_url=served.base_url, auth=AUTH, timeout=60) as client:
        ids = [(await client.put(f"/v1/jobs/{echo}/random_id", json={"data": 1})).json()["id"] for _ in range(12)]

        async def call_back(id: str, attempt: int) -> tuple[str, int]:
            response = await client.post(f"/v1/jobs/{echo}/{id}", json={"status": "succeeded", "attempt": attempt})
            return id, response.status_code

        answers = await asyncio.gather(*(call_back(id, attempt) for id in ids for attempt in (3, 3, 2)))
        for id in ids:
            assert sorted(status for answered, status in answers if answered == id) == [200, 400, 400]
            assert (await client.get(f"/v1/jobs/{id}")).json()["status"] == "succeeded"
