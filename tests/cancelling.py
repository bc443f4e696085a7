"""Requests of an iteration that are cancelled, as by `asyncio.wait_for(anext(iterator), 5)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest


async def a_cancelled_request(iterator: AsyncIterator[Any]) -> None:
    """Ask, and cancel the request while it waits."""
    request = asyncio.ensure_future(anext(iterator))
    await asyncio.sleep(0.05)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
