"""What every request passes before a route sees it.

Plain ASGI, since it runs for each of thousands of requests a second. In order: a request id; the refusal of unencrypted
proxy traffic and of other hosts; the hot routes, one expression for each; the pages of the dashboard; then the application,
which finds the route (404 and 405 are answered without credentials, as Rickover does) and lets the call in before it reads
the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.logs import get_logger
from penstock.errors import PenstockError
from penstock.http.call import Call
from penstock.http.dashboard.dashboard import Dashboard
from penstock.http.errors import from_penstock, insecure, not_found, not_one_host, server_error
from penstock.http.origin import lacks_one_host
from penstock.http.paths import as_get, with_escapes
from penstock.http.routing import HotRoute
from penstock.http.service import Service
from penstock.http.websocket import admit

log = get_logger("penstock.http")
# A health check calls the server by its address.
_ANY_HOST = ("/healthz", "/readyz")


class Middleware:
    """The outermost ASGI application.

    Args:
        inner: The routes, as an application.
        routes: The same routes.
        service: Gives the service of the running server.
    """

    def __init__(self, inner: ASGIApp, routes: Sequence[BaseRoute], service: Callable[[], Service | None]) -> None:
        self._inner = inner
        self._routes = routes
        self._service = service
        self._hot: dict[str, list[HotRoute]] = {}
        for route in routes:
            if isinstance(route, HotRoute):
                self._hot.setdefault(route.method, []).append(route)

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
        call = Call(scope, receive, send, service)
        try:
            await self._answer(call)
        except ClientDisconnect:
            call.route = "gone"
        except PenstockError as error:
            answer = from_penstock(error, scope["path"])
            if answer.status >= 500:
                log.error("request_failed", request_id=call.id.decode(), path=scope["path"], error=error)
            await call.refuse(answer)
        except Exception:
            log.exception("request_failed", request_id=call.id.decode(), path=scope["path"])
            await call.refuse(server_error())
        finally:
            call.done()

    async def _answer(self, call: Call) -> None:
        service = call.service
        scope = call.scope = with_escapes(call.scope)
        path: str = scope["path"]
        if call.forwarded == b"http" and not service.settings.allow_unencrypted_proxy_traffic:
            call.secure = False
            raise insecure(path)
        if lacks_one_host(scope, call.host):
            raise not_one_host(path)
        origins = service.origins
        if not origins.any_host and path not in _ANY_HOST:
            origins.check_host(call.host)
        for route in self._hot.get(call.method, ()):
            if (parameters := route.parameters_of(path)) is not None:
                await route.answer(call, parameters)
                return
        structlog.contextvars.bind_contextvars(request_id=call.id.decode())
        # The expressions of the routes take a newline after the end for the end.
        if path.endswith("\n"):
            raise not_found(path)
        scope = call.scope = as_get(scope)
        scope["call"], scope["service"] = call, service
        if (page := Dashboard.serves(path)) is not None:
            call.route = page
            # The form has a password.
            call.debug = call.debug and page != "/login"
            await service.part(Dashboard)(scope, call.receive_limited, call.send_decorated)
            return
        await self._inner(scope, call.receive_limited, call.send_decorated)


def _discreet(send: Send) -> Send:
    """`send` for the start of the server, whose failure uvicorn would log with what its exceptions said."""

    async def sending(message: Message) -> None:
        if message["type"] in ("lifespan.startup.failed", "lifespan.shutdown.failed"):
            log.error("server_failed_to_" + ("start" if "startup" in message["type"] else "stop"))
            message = {"type": message["type"]}
        await send(message)

    return sending
