"""Declarations of what runs around handlers, as `Penstock` offers them: middleware, lifespans, functions at the start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from penstock.core.hooks import Lifespan, Middleware
from penstock.postgres.context import Declarations

S = TypeVar("S")


class HookDeclarations(Declarations):
    """Declares what runs around the handlers of all kinds of work."""

    def middleware(self, function: Middleware) -> Middleware:
        """Put a function around each handler: of jobs, batches of events, messages and runs of schedules; `@app.middleware`.

        It is `async def timed(work, call_next)`, where `work` is the `Job`, `Batch` or `Tick`; `await call_next(work)` runs what
        is inside and returns the result of the handler, or raises its error. What it returns or raises is the outcome: `Retry`,
        `Fail` and other errors mean what they mean in a handler. The first one is the outermost. Plain handlers run in their
        threads or processes, inside it. A handler of `Events` takes its batches by itself, without middleware.

        Args:
            function: The middleware.

        Raises:
            InvalidInput: It is not an async function of two arguments.
        """
        return self.context.hooks.add_middleware(function)

    def lifespan(self, function: Callable[[], AsyncIterator[S]]) -> Lifespan[S]:
        """Set up what handlers share, such as a client or a model, before a worker's first handler, and clean up after its last.

        It is an async generator that yields once. Handlers get what it yields as a dependency:

            @app.lifespan
            async def clients() -> AsyncIterator[Clients]:
                async with httpx.AsyncClient() as http:
                    yield Clients(http)

            @app.job
            async def fetch(job: Job[Page], clients: Annotated[Clients, Depends(clients)]) -> None: ...

        Args:
            function: The generator.

        Raises:
            InvalidInput: It is not an async generator without parameters.
        """
        return self.context.hooks.add_lifespan(function)

    def on_startup(self, function: Callable[[], S]) -> Callable[[], S]:
        """Call a function in each worker before it claims, after the lifespans have begun: `@app.on_startup`.

        Functions are called in their order, plain ones in a thread. When one raises an error, the worker ends with it.

        Args:
            function: The function, plain or async, without parameters.

        Raises:
            InvalidInput: It takes arguments, or is a generator: what has to be cleaned up is a lifespan.
        """
        return self.context.hooks.add_startup(function)

    @property
    def dependency_overrides(self) -> dict[Callable[..., Any], Callable[..., Any]]:
        """Functions that stand in for dependencies, as in `app.dependency_overrides[get_session] = fake_session` in a test."""
        return self.context.hooks.dependency_overrides
