"""Receiving a topic on a WebSocket: each message is acknowledged, or fails and comes again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from penstock.client.deliveries import Delivery, delivery_of, handshake, raise_end


async def work(http: httpx.AsyncClient, path: str, params: Mapping[str, Any]) -> AsyncIterator[Delivery[Awaitable[None]]]:
    """Messages of one connection, until the server ends it. Raises `DatabaseUnavailable` when it breaks."""
    url, headers = handshake(http.build_request("GET", path, params=params), http.auth)
    try:
        async with connect(url, additional_headers=headers) as socket:
            async for frame in socket:
                if (delivery := delivery_of(frame, socket.send)) is not None:
                    yield delivery
    except (OSError, WebSocketException) as error:
        raise_end(error)
