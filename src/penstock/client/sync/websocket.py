"""Receiving a topic on a WebSocket: each message is acknowledged, or fails and comes again.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from penstock.client.deliveries import Delivery, delivery_of, handshake, raise_end


def work(http: httpx.Client, path: str, params: Mapping[str, Any]) -> Iterator[Delivery[None]]:
    """Messages of one connection, until the server ends it. Raises `DatabaseUnavailable` when it breaks."""
    url, headers = handshake(http.build_request("GET", path, params=params), http.auth)
    try:
        with connect(url, additional_headers=headers) as socket:
            for frame in socket:
                if (delivery := delivery_of(frame, socket.send)) is not None:
                    yield delivery
    except (OSError, WebSocketException) as error:
        raise_end(error)
