"""A key for which the rule of a pool fails waits, with its error in sight; everything else goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Job, NotFound, Penstock
from penstock.groups import membership
from penstock.groups.assignors import Candidate
from tests.command_line import penstock
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"


class Rule:
    """A rule that can be mended."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def __call__(self, key: str, workers: Sequence[Candidate]) -> Any:
        answer = self.answers.get(key, 0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


async def test_a_key_for_which_the_rule_fails_waits_and_all_else_goes_on(app: Penstock, url: str) -> None:
    ran: Counter[str] = Counter()
    rule = Rule({"raises": KeyError("no such tenant"), "exits": SystemExit(1), "bool": True, "far": 7, "none": None})
    pool = app.pool("work", assign=rule)

    @pool.job
    async def handle(job: Job[int]) -> None:
        ran[str(job.key)] += 1

    @app.job("other")
    async def other(job: Job[int]) -> None:
        ran["other"] += 1

    async with Workers(app) as working:
        await pool.enqueue_many(
            [(key, n) for n in range(3) for key in ("good", "raises", "exits", "bool", "far", "none", "fine")]
        )
        await other.enqueue(1)
        await eventually(lambda: ran == {"good": 3, "fine": 3, "other": 1}, "the jobs of good keys")
        # A worker that joins meets the bad keys too.
        await working.add()
        await pool.enqueue("later", 1)
        await eventually(lambda: ran["later"] == 1, "a new key")
        bad = {key.key: (key.error, key.jobs) for key in await pool.quarantined_keys()}
        assert set(bad) == {"raises", "exits", "bool", "far"}
        assert bad["raises"] == ("KeyError: 'no such tenant'", 3)
        assert [key.key for key in await pool.quarantined_keys(after="bool", limit=2)] == ["exits", "far"]

        rule.answers.clear()
        await pool.release_key("raises")
        await eventually(lambda: ran["raises"] == 3, "the jobs of the key whose rule was mended")
        # Asking the rule about one asks it about all.
        await eventually(lambda: sum(ran.values()) == 3 * 7 + 2, "all jobs")
        assert await pool.quarantined_keys() == []
        with pytest.raises(NotFound, match="not quarantined"):
            await pool.release_key("raises")
    assert not working.workers[0][1].exception()


async def test_quarantined_keys_are_asked_about_again_after_a_while(app: Penstock, sql: Sql) -> None:
    rule = Rule({"bad": ValueError("not yet")})
    pool = app.pool("work", assign=rule)
    done = []

    @pool.job
    async def handle(job: Job[int]) -> None:
        done.append(job.data)

    async with Workers(app):
        await pool.enqueue("bad", 1)
        await eventually(pool.quarantined_keys, "the quarantine")
        assert await sql.fetchval("select penstock.release_keys('work', null, '1 hour')") == 0
        assert await sql.fetchval("select penstock.release_keys('work')") == 1
        rule.answers.clear()
        await sql.fetchval("select penstock.release_keys('work')")
        await eventually(lambda: done == [1], "the job")


async def test_a_key_whose_rule_was_mended_is_free_by_itself(app: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "ASK_AGAIN_AFTER", timedelta(milliseconds=100))
    rule = Rule({"bad": ValueError("not yet")})
    pool = app.pool("work", assign=rule)
    done = []

    @pool.job
    async def handle(job: Job[int]) -> None:
        done.append(job.data)

    async with Workers(app):
        await pool.enqueue("bad", 1)
        await eventually(pool.quarantined_keys, "the quarantine")
        rule.answers.clear()
        await eventually(lambda: done == [1], "the job")
        assert await pool.quarantined_keys() == []


async def test_the_command_line_lists_and_releases_quarantined_keys(
    app: Penstock, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the workers free the key by themselves.
    monkeypatch.setattr(membership, "ASK_AGAIN_AFTER", timedelta(hours=1))
    rule = Rule({"bad": ValueError("not yet")})
    pool = app.pool("work", assign=rule)

    @pool.job
    async def handle(job: Job[int]) -> None: ...

    def call(*arguments: str) -> Any:
        ended = penstock(url, "pools", *arguments, "--json")
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    async with Workers(app):
        await pool.enqueue("bad", 1)
        await eventually(pool.quarantined_keys, "the quarantine")
        (key,) = call("keys", "work", "--quarantined")
        assert (key["key"], key["error"], key["jobs"]) == ("bad", "ValueError: not yet", 1)
        assert call("key", "work", "bad")["quarantine_error"] == "ValueError: not yet"
        rule.answers.clear()
        call("key", "work", "bad", "--release")
        await eventually(lambda: empty(pool), "the release")


async def empty(pool: Any) -> bool:
    return not await pool.quarantined_keys()
