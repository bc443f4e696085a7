"""Signatures of many errors at once: what is common is done once, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
from functools import cache
from typing import Any, cast
from uuid import uuid4

import pytest

from penstock.core import signatures
from penstock.core.signatures import SLICE, signature_of, signed, signed_in_slices
from penstock.jobs import claim_queries, http_queries
from penstock.jobs.http_queries import Callback
from penstock.jobs.models import Outcome, Settlement
from penstock.postgres.database import Database

MANY = 20 * SLICE


def error(message: str, **more: Any) -> str:
    return json.dumps({"type": "ValueError", "message": message, **more})


class Counted:
    """Counts the messages whose signature is made, and the most of them between two turns of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.most, self._since = 0, 0, 0

        def counting(type: str, message: str) -> str:
            self.made += 1
            self._since += 1
            self.most = max(self.most, self._since)
            return signature_of(type, message)

        monkeypatch.setattr(signatures, "signature_of", counting)

    async def turns(self) -> None:
        """Run beside what is counted, until cancelled."""
        while True:
            self._since = 0
            await asyncio.sleep(0)


class Written:
    """A database that keeps the arguments of its calls."""

    def __init__(self) -> None:
        self.arguments: list[tuple[Any, ...]] = []

    async def fetch(self, _: str, *arguments: Any, **options: Any) -> list[Any]:
        self.arguments.append(arguments)
        return []


async def beside(counted: Counted, call: Any) -> Any:
    """The answer of a call, while another task wants its turns."""
    turns = asyncio.create_task(counted.turns())
    await asyncio.sleep(0)
    try:
        return await call
    finally:
        turns.cancel()
        await asyncio.gather(turns, return_exceptions=True)


async def test_the_event_loop_goes_on_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    errors = [error(f"no order of customer-{number}x") for number in range(MANY)]
    found = await beside(counted, signed_in_slices(errors, "v2"))
    assert counted.made == MANY
    assert counted.most <= SLICE
    assert found == [signed(one, "v2") for one in errors]


async def test_the_event_loop_goes_on_while_the_patterns_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, most, since = 0, 0, 0

    @cache
    def counted(pattern: str) -> re.Pattern[str]:
        nonlocal compiled
        compiled += 1
        return re.compile(pattern)

    async def turns() -> None:
        nonlocal most, since
        while True:
            most, since = max(most, compiled - since), compiled
            await asyncio.sleep(0)

    monkeypatch.setattr(signatures, "compiled", counted)
    signatures.patterns.cache_clear()
    turning = asyncio.create_task(turns())
    try:
        assert await signed_in_slices([None]) == [None]
        assert compiled == 0, "there was nothing to sign"
        await signed_in_slices([error("no order 7")])
    finally:
        turning.cancel()
    patterns = len({pattern for pattern, _ in signatures.VARYING})
    assert (compiled, most) == (patterns, 1)


async def test_long_messages_are_fewer_in_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    errors = [error(f"no order of customer-{number}x " + "y" * 800) for number in range(MANY)]
    found = await beside(counted, signed_in_slices(errors))
    assert counted.made == MANY
    assert counted.most == 3, "the third one is beyond the characters of a slice"
    assert found == [signed(one) for one in errors]


async def test_each_message_is_looked_at_once_however_often_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    # More messages than are remembered from one batch to the next, in the order that forgets each before it comes again.
    messages = [f"no order of customer-{number}x" for number in range(3_000)]
    errors = [*(error(message) for message in messages), None, *(error(message, traceback="another") for message in messages)]
    found = await signed_in_slices([*errors, errors[0]])
    assert counted.made == len(messages)
    assert [one is None for one in found] == [one is None for one in errors] + [False]
    assert found[-1] == found[0]
    assert {json.loads(one)["signature"] for one in (found[0], found[len(messages) + 1]) if one} == {
        signature_of("ValueError", messages[0])
    }


async def test_what_a_message_has_below_its_first_line_is_not_looked_at_again() -> None:
    signatures.normalised_line.cache_clear()
    await signed_in_slices([error(f"no order\nof {number}") for number in range(10)])
    await signed_in_slices([error(f"no order\nof {number}") for number in range(10, 20)])
    assert signatures.normalised_line.cache_info().misses == 1


async def test_a_batch_of_failures_is_settled_with_signatures_and_results_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, written = Counted(monkeypatch), Written()
    errors = [error(f"no order of customer-{number}x") for number in range(MANY)]
    settlements = [Settlement(uuid4(), 1, 1, Outcome.FAILED, one) for one in errors]
    others = [Settlement(uuid4(), 1, 1, Outcome.SUCCEEDED, error("a result")), Settlement(uuid4(), 1, 1, Outcome.RELEASED)]
    await beside(counted, claim_queries.settle(cast("Database", written), [*settlements, *others], "v2"))
    assert counted.most <= SLICE
    (arguments,) = written.arguments
    assert list(arguments[4]) == [*(signed(one, "v2") for one in errors), others[0].detail, None]


async def test_a_batch_of_callbacks_is_settled_with_signatures_and_results_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, written = Counted(monkeypatch), Written()
    errors = [error(f"no order of customer-{number}x") for number in range(MANY)]
    callbacks = [*(Callback("mail", uuid4(), 1, "failed", one) for one in errors), Callback("mail", uuid4(), 1, "succeeded", "1")]
    await beside(counted, http_queries.settle_attempts(cast("Database", written), callbacks))
    assert counted.most <= SLICE
    (arguments,) = written.arguments
    assert list(arguments[4]) == [*(signed(one) for one in errors), "1"]
