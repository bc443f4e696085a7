"""How a client reaches its server: what httpx is told, and how long a call that failed is repeated."""

from __future__ import annotations

import random
import ssl
from typing import Any

import httpx

from penstock.errors import InvalidInput

LONGEST_WAIT_S = 30.0


def options_for(url: str, user: str | None, password: str, token: str | None, timeout_s: float) -> dict[str, Any]:
    """Arguments for httpx. A user in the URL is as good as one beside it. Raises `InvalidInput` when the URL is not one."""
    parsed = _parsed(url)
    headers = {"User-Agent": "penstock-client"}
    auth: tuple[str, str] | None = None
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    elif user is not None:
        auth = (user, password)
    elif parsed.username:
        auth = (parsed.username, parsed.password)
    # The certificates of the authorities are read for https alone: that takes longer than a call.
    verify = True if parsed.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return {
        "verify": verify,
        "base_url": parsed.copy_with(username=None, password=None),
        "auth": auth,
        "headers": headers,
        "timeout": httpx.Timeout(timeout_s, read=timeout_s + LONGEST_WAIT_S),
    }


def _parsed(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        # A password in it is not for the eyes of those who read errors.
        shown = str(url).rpartition("@")[2]
        raise InvalidInput(
            f"the URL of a server begins with http:// or https:// and a host, not {shown[:100]!r}",
            hint="For example: http://localhost:9090",
        )
    return parsed


def pause_after(attempt: int) -> float:
    """Seconds before a call is repeated."""
    return min(0.1 * 2.0**attempt, 2.0) * random.uniform(0.5, 1.0)
