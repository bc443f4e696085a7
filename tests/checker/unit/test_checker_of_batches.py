"""The checker of batches finds what is wrong in histories that are made for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker.batches import Begun, Settled, check_batches

WORKED = {"a": {"n": 1, "does": None}}
FAILED = {"a": {"n": 1, "does": "fail"}}
FINAL = {"a": {"n": 1, "does": "final"}}


def settled(attempt: int = 1, status: str = "succeeded", result: Any = None, *errors: tuple[int, str, str]) -> Settled:
    return Settled("a", status, attempt, {"n": 1, "attempt": attempt} if result is None else result, errors)


def begun(*attempts: int) -> list[Begun]:
    return [Begun("a", attempt) for attempt in attempts]


@pytest.mark.parametrize(
    ("enqueued", "attempts", "row"),
    [
        (WORKED, begun(1), settled()),
        (WORKED, begun(1, 3), settled(3)),
        (FAILED, begun(1, 2), settled(2, "succeeded", None, (1, "ValueError", "job 1"))),
        (FINAL, begun(1), settled(1, "failed", None, (1, "Fail", "job 1"))),
    ],
)
def test_a_run_without_violations(enqueued: Any, attempts: list[Begun], row: Settled) -> None:
    assert check_batches(enqueued, attempts, [row]) == []


@pytest.mark.parametrize(
    ("enqueued", "attempts", "rows", "violation"),
    [
        (WORKED, begun(1), [], "archived 0 times"),
        (WORKED, begun(1), [settled(), settled()], "archived 2 times"),
        ({}, begun(1), [settled()], "was not enqueued"),
        (WORKED, begun(1, 1), [settled()], "began twice"),
        (WORKED, begun(1, 2), [settled()], "ended with attempt 1"),
        (WORKED, begun(), [settled()], "ended with attempt 1"),
        (WORKED, begun(1), [settled(1, "failed")], "is to have succeeded, failed"),
        (FINAL, begun(1), [settled()], "is to have failed, succeeded"),
        (WORKED, begun(1), [settled(1, "succeeded", {"n": 2, "attempt": 1})], "has the result"),
        (WORKED, begun(1, 2), [settled(2, "succeeded", {"n": 1, "attempt": 1})], "has the result"),
        (WORKED, begun(1, 2), [settled(2, "succeeded", None, (1, "ValueError", "job 1"))], "is to succeed, has the errors"),
        (FAILED, begun(1, 2), [settled(2, "succeeded", None, (1, "ValueError", "job 2"))], "is to fail, has the errors"),
        (FINAL, begun(1), [settled(1, "failed")], "is to final, has the errors"),
    ],
)
def test_a_violation_is_named(enqueued: Any, attempts: list[Begun], rows: list[Settled], violation: str) -> None:
    assert violation in "\n".join(check_batches(enqueued, attempts, rows))
