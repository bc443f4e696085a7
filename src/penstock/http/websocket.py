"""Lets WebSockets in: the same refusals as for requests, answered before the connection is one.

A browser cannot give a WebSocket a header of its own. So a token may come as a subprotocol, `penstock.bearer.` and the token in
base64url, beside the subprotocol `penstock`. A browser also sends the password that it keeps for a site along with connections
that pages of other sites open; so those are refused, unless their origin is one of `trusted_origins`.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Sequence
from typing import Any

import structlog
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.logs import get_logger
from penstock.errors import PenstockError
from penstock.http.errors import JSON, ApiError, from_penstock, insecure, not_found, not_one_host, server_error
from penstock.http.origin import lacks_one_host, with_security
from penstock.http.paths import with_escapes
from penstock.http.routing import guard_of
from penstock.http.service import Service

log = get_logger("penstock.http")
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
            message = {**message, "headers": [*message["headers"], *with_security(message["headers"])]}
        accepted = accepted or message["type"] == "websocket.accept"
        await send(message)

    try:
        scope = with_escapes(scope)
        headers = dict(scope["headers"])
        # Two of them are none that this server answers to, nor the origin of a page.
        host = b",".join(value for name, value in scope["headers"] if name == b"host")
        if lacks_one_host(scope, host):
            raise not_one_host(path)
        service.origins.check_host(host)
        if headers.get(b"x-forwarded-proto") == b"http" and not service.settings.allow_unencrypted_proxy_traffic:
            raise insecure(path)
        route = next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
        if route is None:
            raise not_found(path)
        template = str(route.path_format)
        service.origins.check_site(headers.get(b"origin", b""), headers.get(b"sec-fetch-site", b""), host, path)
        peer = scope["client"][0] if scope.get("client") else ""
        forwarded = b",".join(value for name, value in scope["headers"] if name == b"x-forwarded-for")
        try:
            principal = await service.authenticator.enter(authorization_of(scope), service.proxies.client(peer, forwarded), path)
        except ApiError:
            service.metrics.refused()
            raise
        role = guard_of(route.dependant)[0]
        if role is not None and principal.role < role:
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


def authorization_of(scope: Scope) -> bytes | None:
    """The credentials: of the subprotocol, or of the header."""
    for protocol in scope.get("subprotocols", ()):
        if protocol.startswith(_BEARER):
            encoded = protocol.removeprefix(_BEARER)
            try:
                return b"Bearer " + base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
            except (binascii.Error, ValueError):
                return b"Bearer "
    return dict(scope["headers"]).get(b"authorization")
