"""Following by Server-Sent Events: what comes, for as long as the caller iterates, over connections that break and come back.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
from httpx_sse import EventSource

from penstock.client.answers import error_of
from penstock.client.following import Following
from penstock.errors import DatabaseUnavailable


def follow(http: httpx.Client, following: Following) -> Iterator[dict[str, Any]]:
    """Payloads as they come, for ever. Raises `OffsetGone`, `Conflict`, `NotFound` when what comes next is gone."""
    while True:
        try:
            with http.stream("GET", following.path, params=following.params, headers=following.headers) as response:
                if response.status_code >= 400:
                    response.read()
                    raise error_of(response)
                for event in EventSource(response).iter_sse():
                    if (found := following.took(event)) is not None:
                        yield found
        except (httpx.TransportError, DatabaseUnavailable) as error:
            time.sleep(following.broke(error))
