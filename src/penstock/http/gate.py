"""The gate: what every request passes before a route sees it, and the hot route itself.

Plain ASGI, since it runs for each of thousands of requests a second. In order: a request id; the refusal of unencrypted
proxy traffic; routing (404 and 405 are answered without credentials, as Rickover does); the door; the limit of the body
before and while it is read. `PUT` and `POST /v1/jobs/{name}/{id}` are answered here, without the frame that documents them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock._version import __version__
from penstock.errors import PenstockError
from penstock.http.auth import Principal, Role
from penstock.http.errors import JSON, ApiError, from_penstock, insecure, method_not_allowed, not_found, server_error, too_large
from penstock.http.origin import PLAIN, SAFE_METHODS, with_security
from penstock.http.paths import as_get, with_escapes
from penstock.http.service import Service
from penstock.http.sockets import admit
from penstock.http.whole import write_whole
from penstock.logs import get_logger

log = get_logger("penstock.http")
_JOB = re.compile(r"/v1/jobs/([^\s/]+)/(job_[^\s/]+|random_id|[^\s/]{20,40})")
_JOB_ROUTE = "/v1/jobs/{name}/{id}"
_HSTS = (b"strict-transport-security", b"max-age=31536000; includeSubDomains; preload")
_SERVER = (b"server", f"penstock/{__version__}".encode())
# What every JSON answer has, as it is written, without and with encryption.
_ALWAYS = [b"".join(b"%s: %s\r\n" % header for header in headers) for headers in ([*PLAIN, _SERVER], [*PLAIN, _SERVER, _HSTS])]
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,100}")
_SLOWEST_BYTES_S = 1024
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
# Whoever checks whether a server lives calls it by its address.
_ANY_HOST = ("/healthz", "/readyz")


class Gate:
    """The outermost ASGI application.

    Args:
        inner: The routes, as an application.
        routes: The same routes, for finding out what a path is.
        service: Gives the service of the running server.
    """

    def __init__(self, inner: ASGIApp, routes: Sequence[Any], service: Callable[[], Service | None]) -> None:
        self._inner = inner
        self._routes = routes
        self._service = service

    def stop(self) -> None:
        """End long polls and waits."""
        if (service := self._service()) is not None:
            service.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] not in ("http", "websocket"):
            await self._inner(scope, receive, _discreet(send))
            return
        service = self._service()
        if service is None:
            raise RuntimeError("the application was not started: the server must support lifespan events")
        if scope["type"] == "websocket":
            await admit(scope, receive, send, service, self._routes, self._inner)
            return
        request = _Request(scope, receive, send, service)
        try:
            await self._answer(request)
        except ClientDisconnect:
            request.route = "gone"
        except PenstockError as error:
            answer = from_penstock(error, scope["path"])
            if answer.status >= 500:
                log.error("request_failed", request_id=request.id.decode(), path=scope["path"], error=error)
            await request.refuse(answer)
        except Exception:
            log.exception("request_failed", request_id=request.id.decode(), path=scope["path"])
            await request.refuse(server_error())
        finally:
            request.done()

    async def _answer(self, request: _Request) -> None:
        scope, service = request.scope, request.service
        path = scope["path"]
        if request.forwarded == b"http" and not service.settings.allow_unencrypted_proxy_traffic:
            request.secure = False
            raise insecure(path)
        origins = service.origins
        if not origins.any_host and path not in _ANY_HOST:
            origins.check_host(request.host)
        if request.method in ("PUT", "POST") and (match := _JOB.fullmatch(path)) is not None:
            request.route = _JOB_ROUTE
            origins.check_site(request.origin, request.site, request.host, path)
            if request.method == "PUT":
                principal = await request.enter(Role.ENQUEUE)
                body = await request.body()
                job, admission = await service.put(principal, match[1], match[2], body, path)
                await request.send_json(202, job, (b"penstock-outcome", admission.encode()))
            else:
                principal = await request.enter(Role.WORK)
                await service.record_status(principal, match[1], match[2], await request.body(), path)
                await request.send_json(200, b"")
            return
        structlog.contextvars.bind_contextvars(request_id=request.id.decode())
        scope = request.scope = as_get(with_escapes(scope))
        path = scope["path"]
        route, allowed = self._find(scope)
        if route is None:
            request.route = "other method" if allowed else "none"
            if not allowed:
                raise not_found(path)
            names = ", ".join([*(method for method in _METHODS if method in allowed), "OPTIONS"])
            if request.method != "OPTIONS":
                raise method_not_allowed(path, names)
            await request.send_empty(200, [(b"allow", names.encode())])
            return
        request.route = str(route.path_format)
        role = getattr(route, "role", Role.ADMIN)
        if request.method not in SAFE_METHODS or (role or Role.READ) > Role.READ:
            # To receive a topic is a GET, and takes messages.
            origins.check_site(request.origin, request.site, request.host, path)
        if role is not None:
            scope["principal"] = await request.enter(role)
        scope["service"] = service
        request.limit = service.settings.max_batch if getattr(route, "batch", False) else service.settings.max_body
        request.check_length()
        await self._inner(scope, request.receive_limited, request.send_decorated)

    def _find(self, scope: Scope) -> tuple[Any, set[str]]:
        """The route of a request, or None and the methods that there are for its path."""
        allowed: set[str] = set()
        for route in self._routes:
            match, _ = route.matches(scope)
            # The expressions of the routes take a newline after the end for the end.
            if match is Match.FULL and not scope["path"].endswith("\n"):
                return route, allowed
            if match is Match.PARTIAL and not scope["path"].endswith("\n"):
                allowed |= getattr(route, "methods", None) or set()
        if "GET" in allowed:
            allowed.add("HEAD")
        return None, allowed


class _Request:
    """One request on its way through the gate."""

    __slots__ = (
        "_body_time", "_receive", "_send", "_started_at", "authorization", "body_read", "client", "debug",
        "forwarded", "forwarded_for", "host", "id", "length", "limit", "method", "origin",
        "principal", "read", "route", "scope", "secure", "service", "site", "started", "status",
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
        self.authorization: bytes | None = None
        self.forwarded = self.forwarded_for = b""
        self.host = self.origin = self.site = b""
        self.length = b""
        self.id = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                self.authorization = value
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
        self.id = self.id or secrets.token_hex(8).encode()
        peer: str = scope["client"][0] if scope.get("client") else ""
        self.client = service.proxies.client(peer, self.forwarded_for)

    async def enter(self, role: Role) -> Principal:
        """Who this is. Raises `ApiError` unless the role is enough."""
        principal = self.service.door.known(self.authorization)
        if principal is None:
            try:
                principal = await self.service.door.enter(self.authorization, self.client, self.scope["path"])
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
            # Somebody listens for the end of the connection.
            return await self._receive()
        return await self._next()

    async def _next(self) -> Message:
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
            JSON, len(body), b"".join([b"%s: %s\r\n" % header for header in more]), _ALWAYS[self.secure], self.id,
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

    async def send_empty(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Answer without a body."""
        await self.send_decorated(
            {"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", b"0")]}
        )
        await self.send_decorated({"type": "http.response.body", "body": b""})

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
        if self.secure:
            headers.append(_HSTS)
        if self.debug:
            _dump(self.id, "<", str(self.status).encode())
        await self._send(message)

    def done(self) -> None:
        """Count and log the request."""
        took = time.perf_counter() - self._started_at
        self.service.metrics.request(self.method if self.method in _METHODS else "other", self.route, self.status, took)
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


def _discreet(send: Send) -> Send:
    """`send` for the start of the server, whose failure uvicorn would log with what its exceptions said."""

    async def sending(message: Message) -> None:
        if message["type"] in ("lifespan.startup.failed", "lifespan.shutdown.failed"):
            log.error("server_failed_to_" + ("start" if "startup" in message["type"] else "stop"))
            message = {"type": message["type"]}
        await send(message)

    return sending


def _dump(id: bytes, direction: str, what: bytes) -> None:
    sys.stderr.write(f"{id.decode()} {direction} {what.decode('utf-8', 'replace')}\n")
