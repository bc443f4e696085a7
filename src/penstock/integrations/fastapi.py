"""Penstock in a web application of FastAPI or Starlette: a worker beside the requests, and the answers to its errors.

web = FastAPI(lifespan=lifespan(app), exception_handlers=exception_handlers)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from penstock.app import Penstock
from penstock.core.logs import get_logger
from penstock.errors import RETRY, UNAVAILABLE, PenstockError, http_status

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = get_logger("penstock.fastapi")
WebLifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


def lifespan(app: Penstock, *names: str, worker: bool = True, inner: WebLifespan | None = None) -> WebLifespan:
    """The lifespan of a web application that opens a Penstock application, and runs a worker beside the requests.

    The worker shares the event loop of the server: plain handlers run in threads, async ones must not block. It stops with the
    web application, which gives running handlers the grace period. When it ends by an error before, the error is logged, the
    web application goes on, and the error is raised at its shutdown. Each process of the web server has a worker of its own.

    Args:
        app: The Penstock application.
        names: Job types, pools, consumer groups and schedules to work on; none: all.
        worker: Whether to run a worker. False: the application is only opened, for enqueues.
        inner: Another lifespan of the web application, within this one; what it yields is the state of the requests.
    """

    @asynccontextmanager
    async def run(web: Any) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(app)
            if worker:
                await stack.enter_async_context(_working(app, names))
            yield None if inner is None else await stack.enter_async_context(inner(web))

    return run


@asynccontextmanager
async def _working(app: Penstock, names: tuple[str, ...]) -> AsyncIterator[None]:
    worker = await app.worker(*names)
    running = asyncio.create_task(worker.run(), name="penstock worker")
    running.add_done_callback(_ended)
    starting = asyncio.create_task(worker.started())
    await asyncio.wait([running, starting], return_when=asyncio.FIRST_COMPLETED)
    starting.cancel()
    if running.done():
        # It could not start, so that the web application does not start either.
        running.result()
    try:
        yield
    finally:
        worker.stop()
        await running


def _ended(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        log.error("worker_ended", error_type=type(error).__name__, exc_info=error)


async def _answer(request: Request, error: Exception) -> Response:
    from starlette.responses import JSONResponse

    assert isinstance(error, PenstockError)  # noqa: S101 - the handler is registered for nothing else
    status = http_status(error)
    if status == 500:
        raise error
    if status == 503:
        log.error("request_failed", path=request.url.path, error=error)
    detail = UNAVAILABLE if status == 503 else error.message
    return JSONResponse({"detail": detail}, status, {"Retry-After": "1"} if status in RETRY else None)


exception_handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {PenstockError: _answer}
"""Answers requests whose endpoint raised an error of Penstock with the status that Penstock's own HTTP API gives: 429 (with
`Retry-After`) for `QueueFull`, 400 or 413 for `InvalidInput`, 404 for `NotFound`, 409 for `Conflict`, 410 for `OffsetGone`, 503
for a database that is not available. The body is `{"detail": message}`. All others remain errors of the application.
"""
