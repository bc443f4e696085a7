"""One request on its way through the server: who sent it, its body, and its answer.

The middleware makes a call of every request. A hot route is given the call itself. Any other route is an endpoint of FastAPI,
before which the call is authorized and whose `receive` and `send` are the call's.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
import time
from contextlib import AbstractContextManager

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from penstock._version import __version__
from penstock.core.logs import get_logger
from penstock.http.auth import Principal, Role
from penstock.http.errors import JSON, ApiError, too_large
from penstock.http.live_access import Watch
from penstock.http.origin import PLAIN, SAFE_METHODS, with_security
from penstock.http.service import Service
from penstock.http.whole import read_whole, write_whole

log = get_logger("penstock.http")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_HSTS = (b"strict-transport-security", b"max-age=31536000; includeSubDomains")
_HSTS_PRELOAD = (_HSTS[0], _HSTS[1] + b"; preload")
_SERVER = (b"server", f"penstock/{__version__}".encode())
# What every JSON answer has, as it is written, by the header that tells browsers to use encryption.
_ALWAYS = {
    hsts: b"".join(b"%s: %s\r\n" % header for header in (*PLAIN, _SERVER, *([] if hsts is None else [hsts])))
    for hsts in (None, _HSTS, _HSTS_PRELOAD)
}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,100}")
_SLOWEST_BYTES_S = 1024


class Call:
    """One request."""

    __slots__ = (
        "_body_time", "_receive", "_send", "_started_at", "authorization", "body_read", "client", "debug",
        "forwarded", "forwarded_for", "host", "id", "length", "limit", "method", "origin",
        "principal", "read", "role", "route", "scope", "secure", "service", "site", "started", "status",
        "traceparent",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send, service: Service) -> None:
        self._started_at = time.perf_counter()
        self._receive = receive
        self._send = send
        self.scope = scope
        self.service = service
        self.method: str = scope["method"]
        self.limit = service.settings.max_body
        self.debug = service.settings.debug_traffic
        self.route: str = "none"
        self.secure = True
        self.started = False
        self.status = 0
        self.read = 0
        self.body_read = False
        # Seconds that were spent on waiting for the body.
        self._body_time = 0.0
        self.principal: Principal | None = None
        self.role: Role | None = None
        self.authorization: bytes | None = None
        self.forwarded = self.forwarded_for = b""
        self.host = self.origin = self.site = b""
        self.length = b""
        self.id = self.traceparent = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                # Two of them are none: a proxy in front of the server may have read the other one.
                self.authorization = value if self.authorization is None else self.authorization + b"," + value
            elif name == b"content-length":
                self.length = value
            elif name == b"x-forwarded-proto":
                self.forwarded = value
            elif name == b"host":
                # Two of them are none that this server answers to, nor the origin of a page.
                self.host = self.host + b"," + value if self.host else value
            elif name == b"origin":
                self.origin = value
            elif name == b"sec-fetch-site":
                self.site = value
            elif name == b"x-forwarded-for":
                self.forwarded_for = self.forwarded_for + b"," + value if self.forwarded_for else value
            elif name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                self.id = value
            elif name == b"traceparent":
                # Two of them are none.
                self.traceparent = self.traceparent + b"," + value if self.traceparent else value
        self.id = self.id or secrets.token_hex(8).encode()
        peer: str = scope["client"][0] if scope.get("client") else ""
        self.client = service.proxies.client(peer, self.forwarded_for)

    @property
    def user(self) -> Principal:
        """Who sent it, once it was let in."""
        if self.principal is None:
            raise RuntimeError("the call was not let in")
        return self.principal

    @property
    def _hsts(self) -> tuple[bytes, bytes] | None:
        if not self.secure:
            return None
        return _HSTS_PRELOAD if self.service.settings.hsts_preload else _HSTS

    @property
    def path(self) -> str:
        """Its path, which errors name as their instance."""
        path: str = self.scope["path"]
        return path

    async def authorize(self, route: str, role: Role | None) -> Principal | None:
        """Let the call in to a route. Raises `ApiError` for a page of another site, and unless the user has the role.

        Args:
            route: Template of its path, for the metrics.
            role: The role that it needs; None: it is open to all clients, and there is no user.
        """
        self.route = route
        self.role = role
        if self.method not in SAFE_METHODS or (role or Role.READ) > Role.READ:
            # To receive a topic is a GET, and takes messages.
            self.service.origins.check_site(self.origin, self.site, self.host, self.scope["path"])
        return None if role is None else await self.enter(role)

    def watching(self) -> AbstractContextManager[Watch]:
        """Watch whether the user may still go on, while a block lasts that takes long."""
        return self.service.access.watching(self.user, self.role, self.authorization)

    def limit_body(self, *, batch: bool) -> None:
        """Take no larger body than the route may have. Raises a 413 when its announced length is larger."""
        self.limit = self.service.settings.max_batch if batch else self.service.settings.max_body
        self.check_length()

    async def enter(self, role: Role) -> Principal:
        """Who this is. Raises `ApiError` unless the role is enough."""
        principal = self.service.authenticator.known(self.authorization)
        if principal is None:
            try:
                principal = await self.service.authenticator.enter(self.authorization, self.client, self.scope["path"])
            except ApiError as error:
                self.service.metrics.refused()
                log.info("login_refused", request_id=self.id.decode(), client=self.client, reason=error.id)
                raise
        self.principal = principal
        if principal.role < role:
            has, wanted = principal.role.name.lower(), role.name.lower()
            title = f"User {principal.name} has the role {has}; this needs {wanted}"
            raise ApiError(403, "forbidden", title, instance=self.scope["path"], in_body=True)
        return principal

    def check_length(self) -> None:
        """Raise a 413 when the announced length is over the limit."""
        if self.length and (not self.length.isdigit() or len(self.length) > 15 or int(self.length) > self.limit):
            raise too_large(f"The request body is too large ({self.limit} bytes max)")

    async def body(self) -> bytes:
        """The whole body. Raises `ApiError` when it is too large or too slow."""
        if self.length:
            self.check_length()
        message = await self._next()
        if message["type"] == "http.request" and not message.get("more_body", False):
            return bytes(message.get("body", b""))
        parts = [message.get("body", b"")]
        while message["type"] == "http.request" and message.get("more_body", False):
            message = await self._next()
            parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        return b"".join(parts)

    async def receive_limited(self) -> Message:
        """`receive` for the routes."""
        if self.started or self.body_read:
            # Another task listens for the end of the connection.
            return await self._receive()
        return await self._next()

    async def _next(self) -> Message:
        if (whole := read_whole(self._receive)) is not None:
            return self._received({"type": "http.request", "body": whole, "more_body": False})
        began = time.perf_counter()
        # The time in which the body is worked on does not count.
        most = self.service.settings.body_timeout.total_seconds() + self.read / _SLOWEST_BYTES_S
        try:
            async with asyncio.timeout(most - self._body_time):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, "request_timeout", "The request body did not arrive in time", in_body=True, headers={"Connection": "close"}
            ) from None
        self._body_time += time.perf_counter() - began
        return self._received(message)

    def _received(self, message: Message) -> Message:
        self.body_read = not message.get("more_body", False)
        body = message.get("body", b"")
        self.read += len(body)
        if self.debug and body:
            _dump(self.id, ">", body)
        if self.read > self.limit:
            raise too_large(f"The request body is too large ({self.limit} bytes max)")
        return message

    async def send_json(self, status: int, body: bytes, *more: tuple[bytes, bytes]) -> None:
        """Answer with JSON."""
        head = b"content-type: %s\r\ncontent-length: %d\r\n%s%sx-request-id: %s\r\n" % (
            JSON, len(body), b"".join([b"%s: %s\r\n" % header for header in more]), _ALWAYS[self._hsts], self.id,
        )  # fmt: skip
        if write_whole(self._send, status, head, body):
            self.started, self.status = True, status
            if self.debug:
                _dump(self.id, "<", str(status).encode())
                _dump(self.id, "<", body)
            return
        headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), *more, *PLAIN]
        await self._send_start({"type": "http.response.start", "status": status, "headers": headers})
        await self.send_decorated({"type": "http.response.body", "body": body})

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun already."""
        if self.started:
            return
        body = error.body()
        headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]
        headers += [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in error.headers.items()]
        await self.send_decorated({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send_decorated({"type": "http.response.body", "body": body})

    async def send_decorated(self, message: Message) -> None:
        """`send` with the headers that every answer has."""
        if message["type"] == "http.response.start":
            headers = [*message["headers"], *with_security(message["headers"])]
            await self._send_start({**message, "headers": headers})
            return
        if self.method == "HEAD":
            message = {**message, "body": b""}
        if self.debug:
            _dump(self.id, "<", message.get("body", b""))
        await self._send(message)

    async def _send_start(self, message: Message) -> None:
        self.started = True
        self.status = message["status"]
        headers = message["headers"]
        headers.append(_SERVER)
        headers.append((b"x-request-id", self.id))
        if (hsts := self._hsts) is not None:
            headers.append(hsts)
        if self.debug:
            _dump(self.id, "<", str(self.status).encode())
        await self._send(message)

    def done(self) -> None:
        """Count and log the request."""
        took = time.perf_counter() - self._started_at
        self.service.metrics.request(self.method if self.method in METHODS else "other", self.route, self.status, took)
        if self.debug:
            _dump(self.id, ">", f"{self.method} {self.scope['path']} {_shown(self.scope['headers'])}".encode())
        if self.service.settings.log_requests:
            log.info(
                "request",
                request_id=self.id.decode(),
                method=self.method,
                path=self.scope["path"],
                status=self.status,
                took_ms=round(took * 1000, 2),
                user=self.principal.name if self.principal else None,
                client=self.client,
            )


# Any other header may carry a credential: of a proxy, a gateway, a cloud, or a subprotocol.
_SHOWN = re.compile(
    rb"accept(-.*)?|access-control-.*|cache-control|connection|content-.*|date|dnt|expect|from|host|if-.*|keep-alive|last-event-id"
    rb"|link|location|origin|pragma|range|referer|sec-ch-.*|sec-fetch-.*|sec-websocket-(version|extensions)|server|te|traceparent"
    rb"|transfer-encoding|upgrade|upgrade-insecure-requests|user-agent|vary|via|x-forwarded-(for|proto|host|port)|x-request-id"
)


def _shown(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers for a log: the values of those that are known to carry no credential."""
    return {
        name.decode("latin-1"): value.decode("latin-1") if _SHOWN.fullmatch(name.lower()) else "***" for name, value in headers
    }


def _dump(id: bytes, direction: str, what: bytes) -> None:
    sys.stderr.write(f"{id.decode()} {direction} {what.decode('utf-8', 'replace')}\n")
