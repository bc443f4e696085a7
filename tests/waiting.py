"""Waiting for a condition, in coroutines (`eventually`) and in plain functions (`until`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest


async def eventually(
    condition: Callable[[], Any] | Callable[[], Awaitable[Any]], what: str = "the condition", timeout: float = 60.0
) -> Any:
    """Wait until a condition holds and return its value; fail with what was waited for."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come true within {timeout:.0f} s")
        await asyncio.sleep(0.02)


def until(condition: Callable[[], Any], what: str, timeout: float = 60.0) -> Any:
    """The same without an event loop."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come true within {timeout:.0f} s")
        time.sleep(0.02)
    return value
