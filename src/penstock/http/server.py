"""The server: the application from its parts, its start and end, and running it with uvicorn in one process or several."""

from __future__ import annotations

import asyncio
import ipaddress
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import disable_created_metrics
from prometheus_client.core import Metric
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.supervisors import Multiprocess

from penstock._version import __version__
from penstock.app import Penstock
from penstock.core import logs
from penstock.core.exported_metrics import exporting
from penstock.core.logs import get_logger
from penstock.core.measuring import measured
from penstock.core.meter import Meter
from penstock.errors import InvalidInput, PenstockError, SchemaMismatch
from penstock.http import system
from penstock.http import user_queries as users
from penstock.http.assembly import Assembly
from penstock.http.auth import Authenticator, Authorizer
from penstock.http.authorizers import authorizer_of
from penstock.http.call import METHODS, Call
from penstock.http.dashboard.dashboard import Dashboard
from penstock.http.dashboard.sessions import new_link
from penstock.http.errors import ApiError, from_penstock, invalid_parameter, method_not_allowed, not_found, server_error
from penstock.http.jobs import batches as batch
from penstock.http.jobs import jobber, lists, types
from penstock.http.jobs import routes as jobs
from penstock.http.middleware import Middleware
from penstock.http.openapi import document
from penstock.http.operations import routes as operations
from penstock.http.paths import with_escapes
from penstock.http.pools import routes as pools
from penstock.http.pools import standing
from penstock.http.routing import error_answer
from penstock.http.schedules import routes as schedules
from penstock.http.settings import HttpSettings
from penstock.http.streams import event_routes as events
from penstock.http.streams import group_routes as groups
from penstock.http.streams import routes as streams
from penstock.http.topics import delivery_routes as deliveries
from penstock.http.topics import routes as topics
from penstock.http.users import new_secret
from penstock.http.workers import routes as working
from penstock.http.workflows import routes as workflows
from penstock.http.workflows import runs as workflow_runs
from penstock.jobs import workflow_ticks
from penstock.postgres.listener import Listener
from penstock.postgres.notifications import Kind, Notifications
from penstock.postgres.rights import takes_part_as
from penstock.postgres.schema_watch import left_behind
from penstock.postgres.translation import lacks_rights
from penstock.worker import maintenance
from penstock.worker.exposition import database_families
from penstock.worker.rates import write_rates

log = get_logger("penstock.http")
# The first route that fits is taken: /v1/jobs/job_... is a job before it is a job type.
_RESOURCES = (
    system, jobs, types, batch, working, lists, jobber, pools, operations, workflows, workflow_runs, schedules, standing, streams,
    events, groups, topics, deliveries,
)  # fmt: skip
# After that uvicorn kills a process as hung and starts another; on a busy machine its five seconds are few.
_SILENCE_OF_A_PROCESS_S = 60
_TICK_S = 0.25
_LAST_RATES_S = 5.0
_ASKED_WITHIN_S = 10.0
# Where the processes of a server leave word for the one that started them, and what they call it.
_FOLDER = "PENSTOCK_SERVER_FOLDER"
_LEFT_BEHIND = "left-behind"
# What a server of the dashboard alone answers beside it, and a path that is no route.
_OF_DASHBOARD = ("/healthz", "/readyz")
_NOT_SERVED = "/not-served"


def create_app(
    app: Penstock | None = None,
    authorizer: Authorizer | None = None,
    settings: HttpSettings | None = None,
    on_left_behind: Callable[[SchemaMismatch], None] | None = None,
) -> ASGIApp:
    """The HTTP API as an ASGI application.

    Args:
        app: The jobs' app; None: one from the environment.
        authorizer: Decides which principal a client is; None: the user admin with the token of the settings, else the users in
            the database.
        settings: None: from the environment.
        on_left_behind: Called when a migration has made the schema one that this version cannot use; until it is ended the
            application answers 503.
    """
    takes_part_as("server")
    http_settings = settings or HttpSettings.read()
    penstock = app or Penstock()
    penstock.context.settings = penstock.settings.model_copy(update={"pool_size": http_settings.pool_size})
    running: list[Assembly] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            meter = stack.enter_context(measured())
            await penstock.open(timeout=penstock.settings.start_timeout)
            await stack.enter_async_context(penstock)
            database = await penstock.database()
            chosen = authorizer or authorizer_of(http_settings, database)
            upkeep = maintenance.of(database, penstock.settings)

            async def watch_schema() -> None:
                error = await left_behind(database)
                log.error("schema_cannot_be_used", error=error, hint=error.hint)
                if on_left_behind is not None:
                    on_left_behind(error)

            notifications = Notifications()
            listener = Listener(database, ["penstock"], notifications.dispatch)
            assembly = Assembly(penstock, database, Authenticator(chosen), http_settings, listener, meter)
            assembly.subscribe(notifications)
            notifications.wake(upkeep.look, Kind.JOBS, Kind.FULL_SCAN, Kind.PLACE, Kind.CONNECTED)
            notifications.wake(partial(workflow_ticks.tell, database), Kind.WORKFLOWS)
            notifications.wake(database.schema_changed.set, Kind.SCHEMA)
            running.append(assembly)
            if penstock.settings.otel_metrics:
                await stack.enter_async_context(_exported(assembly))
            parts = (listener.run(), upkeep.run(assembly.jobs_ready), watch_schema(), _watch_loop(meter))
            tasks = [asyncio.create_task(part) for part in parts]
            _on_signals(assembly.stop)
            try:
                yield
            finally:
                assembly.stop()
                await assembly.close()
                if penstock.settings.rates:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LAST_RATES_S):
                            await write_rates(database)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                running.clear()

    inner = http_routes(lifespan)
    return Middleware(inner, inner.routes, lambda: running[0].service if running else None)


def serve(settings: HttpSettings, announce: Any = print, *, only_dashboard: bool = False) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    Args:
        settings: Settings of the server.
        announce: Called with lines for the person who starts it; a generated token is in one of them, and nowhere else.
        only_dashboard: Whether to serve the dashboard alone, without the HTTP API.

    Raises:
        InvalidInput: It would listen beyond this machine without users.
    """
    settings, link = asyncio.run(_with_token(settings, announce))
    os.environ |= settings.as_environment()
    with tempfile.TemporaryDirectory(prefix="penstock-metrics-") as folder:
        os.environ[_FOLDER] = folder
        if settings.processes > 1:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        config = uvicorn.Config(
            f"penstock.http.server:{'served_dashboard' if only_dashboard else 'served_app'}",
            factory=True,
            host=settings.host,
            port=settings.port,
            workers=settings.processes,
            loop="uvloop",
            http="penstock.http.protocol:Protocol",
            ws="penstock.http.protocol:SocketProtocol",
            ws_max_size=settings.max_body,
            ws_ping_interval=settings.live_keep_alive.total_seconds(),
            ws_ping_timeout=settings.live_keep_alive.total_seconds(),
            lifespan="on",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(settings.keep_alive.total_seconds()),
            timeout_graceful_shutdown=int(settings.shutdown_grace.total_seconds()),
            log_config=None,
            timeout_worker_healthcheck=_SILENCE_OF_A_PROCESS_S,
            backlog=2048,
        )
        socket = config.bind_socket()
        # From here on connections wait for the server instead of being refused.
        socket.listen(config.backlog)
        at = f"http://{settings.host}:{socket.getsockname()[1]}"
        listening = f"listening on {at}\ndashboard: {at}/{link}"
        if settings.processes > 1:
            many = Multiprocess(config, sockets=[socket])
            announce(listening)
            many.run()
        else:
            one = uvicorn.Server(config)

            def end(*_: object) -> None:
                # Before uvicorn listens to signals; and when it has ended, it sends itself the signal again.
                one.should_exit = True

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, end)
            announce(listening)
            one.run(sockets=[socket])
        if (note := Path(folder) / _LEFT_BEHIND).exists():
            message, hint = note.read_text("utf-8").split("\0")
            raise SchemaMismatch(message, hint=hint or None)


@asynccontextmanager
async def _exported(assembly: Assembly) -> AsyncIterator[None]:
    """Give the metrics of this process to OpenTelemetry while the block lasts."""
    service, loop = assembly.service, asyncio.get_running_loop()
    metrics = service.metrics

    def read() -> list[Metric]:
        asked = asyncio.run_coroutine_threadsafe(system.asked(service), loop)
        try:
            return metrics.families(asked.result(_ASKED_WITHIN_S))
        except (TimeoutError, PenstockError):
            return metrics.families(metrics.asked(up=False))
        finally:
            asked.cancel()

    declared = metrics.families(metrics.asked(database=database_families(), up=False))
    async with exporting(declared, read):
        yield


async def _watch_loop(meter: Meter) -> None:
    """Measure how late the event loop wakes, until cancelled."""
    while True:
        due = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        meter.lagged(max(time.monotonic() - due, 0.0))


def served_app() -> ASGIApp:
    """What a server process of `serve` runs."""
    settings = HttpSettings.read()
    logs.configure(settings.log_format, output=2)
    # Without the time at which each series began, which no dashboard needs and which would be as many series again.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    logs.show_payloads(settings.debug_traffic or logs.payloads_shown())
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), name="penstock-parent", daemon=True).start()
    return create_app(settings=settings, on_left_behind=_end_behind)


def served_dashboard() -> ASGIApp:
    """What a process of `penstock dashboard` runs: the same server, of which it serves the dashboard alone."""
    app = served_app()

    async def only(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and Dashboard.serves(with_escapes(scope)["path"]) is None and path not in _OF_DASHBOARD:
            scope = {**scope, "path": _NOT_SERVED, "raw_path": _NOT_SERVED.encode()}
        await app(scope, receive, send)

    return only


def _end_behind(error: SchemaMismatch) -> None:
    """End the server in an orderly way: another process of this version could not use the schema either."""
    (Path(os.environ[_FOLDER]) / _LEFT_BEHIND).write_text(f"{error.message}\0{error.hint or ''}", "utf-8")
    parent = multiprocessing.parent_process()
    os.kill(os.getpid() if parent is None or parent.pid is None else parent.pid, signal.SIGTERM)


def _end_with(parent: int) -> None:
    """Stop this process in an orderly way when the process that started it was killed: no other process would."""
    multiprocessing.connection.wait([parent])
    os.kill(os.getpid(), signal.SIGTERM)


def _on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` when the process is told to end, before uvicorn waits for the requests that are under way."""
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None, before: Any = before) -> None:
            loop.call_soon_threadsafe(stop)
            if callable(before):
                before(number, frame)

        if callable(before):
            signal.signal(number, handle)


async def _with_token(settings: HttpSettings, announce: Any) -> tuple[HttpSettings, str]:
    """The settings, with a token when there are no users and this machine alone can reach the server; and the path of a login."""
    takes_part_as("server")
    secret = new_secret()
    app = Penstock()
    await app.open(timeout=app.settings.start_timeout)
    async with app:
        database = await app.database()
        there_are_users = await users.has_users(database)
        alone = not there_are_users and settings.token is None and _loopback(settings.host)
        link = f"login?token={await new_link(database, secret)}" if alone else ""
    if there_are_users or settings.token is not None:
        return settings, ""
    if not _loopback(settings.host):
        raise InvalidInput(
            f"refusing to listen on {settings.host} without users",
            hint="Add one: penstock users add NAME --role admin. Or listen on 127.0.0.1.",
        )
    announce("no users yet: this token of the user admin is good until the server stops")
    announce(f"  token:    admin.{secret}")
    announce(f"  as curl:  curl -u admin:{secret} http://{settings.host}:{settings.port}/v1/jobs")
    announce("  the link to the dashboard below is good once")
    return settings.model_copy(update={"token": HttpSettings(token=secret).token}), link


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def http_routes(lifespan: Any) -> FastAPI:
    """All routes as an application, without the middleware before them."""
    inner = FastAPI(
        title="Penstock",
        version=__version__,
        lifespan=lifespan,
        routes=[route for resource in _RESOURCES for route in resource.api.routes],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        # FastAPI's own spans and logs have paths, queries and messages of exceptions: keys, searched words and payloads.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )

    @inner.exception_handler(PenstockError)
    async def _penstock(request: Request, error: PenstockError) -> Response:
        answer = from_penstock(error, request.url.path)
        if answer.status >= 500 or lacks_rights(error):
            log.error("request_failed", path=request.url.path, error=error)
        return error_answer(answer)

    @inner.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return error_answer(invalid_parameter(f"Invalid {first['loc'][-1]}: {first['msg']}", request.url.path))

    @inner.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]
        if error.status_code == 404:
            return error_answer(not_found(path))
        if error.status_code == 405:
            return _other_method(request, inner.routes)
        return error_answer(ApiError(error.status_code, "invalid_request", str(error.detail)))

    @inner.exception_handler(Exception)
    async def _unexpected(_request: Request, _error: Exception) -> Response:
        return error_answer(server_error())

    def openapi() -> dict[str, Any]:
        if inner.openapi_schema is None:
            inner.openapi_schema = document(inner.routes)
        return inner.openapi_schema

    inner.openapi = openapi  # type: ignore[method-assign]
    return inner


def _other_method(request: Request, routes: Sequence[BaseRoute]) -> Response:
    """The answer to a method that no route takes for a path: to OPTIONS the methods that there are, to any other a 405."""
    allowed: set[str] = set()
    for route in routes:
        if route.matches(request.scope)[0] is Match.PARTIAL:
            allowed |= getattr(route, "methods", None) or set()
    if "GET" in allowed:
        allowed.add("HEAD")
    names = ", ".join([*(method for method in METHODS if method in allowed), "OPTIONS"])
    call: Call = request.scope["call"]
    call.route = "other method"
    if call.method == "OPTIONS":
        return Response(headers={"allow": names})
    return error_answer(method_not_allowed(request.scope["path"], names))
