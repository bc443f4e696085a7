"""The gate for WebSockets: the same refusals as for requests, answered before the connection is one.

A browser cannot give a WebSocket a header of its own. So a token may come as a subprotocol, `penstock.bearer.` and the token in
base64url, beside the subprotocol `penstock`. A browser also sends the password that it keeps for a site along with connections
that pages of other sites open; so credentials in the header count only when the origin is the server itself.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import structlog
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.http.auth import Role
from penstock.http.errors import JSON, ApiError, from_penstock, insecure, not_found, server_error
from penstock.http.service import Service

log = structlog.get_logger("penstock.http")
SUBPROTOCOL = "penstock"
_BEARER = "penstock.bearer."


async def admit(scope: Scope, receive: Receive, send: Send, service: Service, routes: Sequence[Any], inner: ASGIApp) -> None:
    """Let a WebSocket in, or refuse it with the answer that a request would get."""
    started_at = time.perf_counter()
    id = secrets.token_hex(8)
    path = scope["path"]
    status = 101
    template = "none"
    accepted = False

    async def decorated(message: Message) -> None:
        nonlocal status, accepted
        if message["type"] == "websocket.http.response.start":
            status = message["status"]
        accepted = accepted or message["type"] == "websocket.accept"
        await send(message)

    try:
        headers = dict(scope["headers"])
        if headers.get(b"x-forwarded-proto") == b"http" and not service.settings.allow_unencrypted_proxy_traffic:
            raise insecure(path)
        route = next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
        if route is None:
            raise not_found(path)
        template = str(route.path_format)
        client = scope["client"][0] if scope.get("client") else ""
        try:
            principal = await service.door.enter(_authorization(scope, headers), client, path)
        except ApiError:
            service.metrics.refused()
            raise
        role = getattr(route.endpoint, "role", Role.ADMIN)
        if principal.role < role:
            has, wanted = principal.role.name.lower(), role.name.lower()
            raise ApiError(
                403, "forbidden", f"User {principal.name} has the role {has}; this needs {wanted}", instance=path, in_body=True
            )
        scope["service"], scope["principal"] = service, principal
        structlog.contextvars.bind_contextvars(request_id=id)
        await inner(scope, receive, decorated)
    except PenstockError as error:
        await refuse(from_penstock(error, path), decorated)
    except Exception:
        log.exception("request_failed", request_id=id, path=path)
        if accepted:
            await send({"type": "websocket.close", "code": 1011})
        else:
            await refuse(server_error(), decorated)
    finally:
        service.metrics.request("WEBSOCKET", template, status, time.perf_counter() - started_at)


async def refuse(error: ApiError, send: Send) -> None:
    """Answer the handshake with an error."""
    body = error.body()
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in error.headers.items()]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body, "more_body": False})


def _authorization(scope: Scope, headers: dict[bytes, bytes]) -> bytes | None:
    """The credentials: of the subprotocol, or of the header unless a page of another site uses them."""
    for protocol in scope.get("subprotocols", ()):
        if protocol.startswith(_BEARER):
            encoded = protocol.removeprefix(_BEARER)
            try:
                return b"Bearer " + base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
            except (binascii.Error, ValueError):
                return b"Bearer "
    origin = headers.get(b"origin")
    if origin is not None and urlsplit(origin.decode("latin-1")).netloc != headers.get(b"host", b"").decode("latin-1"):
        raise ApiError(
            403,
            "forbidden",
            "The page that opens this connection is of another site",
            detail=f"Give a token as the subprotocol {_BEARER}<base64url of NAME.SECRET>",
            instance=scope["path"],
            in_body=True,
        )
    return headers.get(b"authorization")
