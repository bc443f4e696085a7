"""Following by Server-Sent Events: what comes, for as long as the caller iterates, over connections that break and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
from httpx_sse import EventSource

from penstock.client.answers import error_of
from penstock.client.following import Following
from penstock.errors import DatabaseUnavailable


async def follow(http: httpx.AsyncClient, following: Following) -> AsyncIterator[dict[str, Any]]:
    """Payloads as they come, for ever. Raises `OffsetGone`, `Conflict`, `NotFound` when what comes next is gone."""
    while True:
        try:
            async with http.stream("GET", following.path, params=following.params, headers=following.headers) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise error_of(response)
                async for event in EventSource(response).aiter_sse():
                    if (found := following.took(event)) is not None:
                        yield found
        except (httpx.TransportError, DatabaseUnavailable) as error:
            await asyncio.sleep(following.broke(error))
