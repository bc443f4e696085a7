"""What an application puts around its handlers: middleware, a lifespan, and stand-ins for dependencies in tests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Generic, TypeAlias, TypeVar

from penstock.core.dependencies import Plan, RunsOnLoop, Solver, name_of
from penstock.core.user_code import check_no_generator, check_ran, is_async
from penstock.errors import Conflict, InvalidInput

S = TypeVar("S")
CallNext: TypeAlias = Callable[[Any], Awaitable[Any]]
Middleware: TypeAlias = Callable[[Any, CallNext], Awaitable[Any]]
Around: TypeAlias = Callable[[Any, Callable[[Mapping[str, Any]], Awaitable[Any]]], Awaitable[Any]]


class Lifespan(RunsOnLoop, Generic[S]):
    """What a worker sets up before its first handler and cleans up after its last one. `Penstock.lifespan` makes it.

    Handlers get what it yields as a dependency: `state: Annotated[State, Depends(lifespan)]`, where `lifespan` is the decorated
    function.
    """

    def __init__(self, function: Callable[[], AsyncIterator[S]]) -> None:
        self._enter = asynccontextmanager(function)
        # For each loop: what it yielded, how many use it, and what ends it. Several workers on one loop share it.
        self._running: dict[asyncio.AbstractEventLoop, tuple[S, int, AsyncExitStack]] = {}
        self._starting: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self.__name__ = getattr(function, "__name__", "lifespan")
        self.__qualname__ = name_of(function)
        self.__doc__ = function.__doc__

    def __call__(self) -> S:
        """What it yielded. Raises `Conflict` while no worker runs on this loop."""
        running = self._running.get(asyncio.get_running_loop())
        if running is None:
            raise Conflict(
                f"the lifespan {self.__qualname__} is not running",
                hint="A worker runs it; in a test use penstock.testing, or `async with lifespan.running()`.",
            )
        return running[0]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[S]:
        """Run it within the block. Nested and parallel blocks of one loop share it; the last one ends it."""
        loop = asyncio.get_running_loop()
        for ended in [each for each in self._starting if each.is_closed()]:
            self._starting.pop(ended)
            self._running.pop(ended, None)
        lock = self._starting.setdefault(loop, asyncio.Lock())
        async with lock:
            if loop not in self._running:
                stack = AsyncExitStack()
                state = await stack.enter_async_context(self._enter())
                self._running[loop] = (state, 0, stack)
            state, users, stack = self._running[loop]
            self._running[loop] = (state, users + 1, stack)
        try:
            yield state
        finally:
            async with lock:
                _, users, _ = self._running[loop]
                if users > 1:
                    self._running[loop] = (state, users - 1, stack)
                else:
                    del self._running[loop]
                    await stack.aclose()


class Hooks:
    """The hooks of one application.

    Attributes:
        middleware: Functions around each handler, the first outermost.
        lifespans: What each worker sets up, in order.
        startups: What each worker calls before it claims, in order.
        dependency_overrides: Functions that stand in for dependencies.
    """

    def __init__(self) -> None:
        self.middleware: list[Middleware] = []
        self.lifespans: list[Lifespan[Any]] = []
        self.startups: list[Callable[[], Any]] = []
        self.dependency_overrides: dict[Callable[..., Any], Callable[..., Any]] = {}

    def add_middleware(self, function: Middleware) -> Middleware:
        """Add middleware inside those added before. Raises `InvalidInput` unless it is async and takes two arguments."""
        if not is_async(function):
            raise InvalidInput(f"middleware {name_of(function)} must be async", hint="async def middleware(work, call_next): ...")
        if len(inspect.signature(function).parameters) != 2:
            raise InvalidInput(
                f"middleware {name_of(function)} must take two arguments", hint="async def middleware(work, call_next): ..."
            )
        self.middleware.append(function)
        return function

    def add_lifespan(self, function: Callable[[], AsyncIterator[S]]) -> Lifespan[S]:
        """Add a lifespan inside those added before. Raises `InvalidInput` unless it is an async generator without parameters."""
        if not inspect.isasyncgenfunction(function) or inspect.signature(function).parameters:
            raise InvalidInput(
                f"the lifespan {name_of(function)} must be an async generator without parameters that yields once",
                hint="async def lifespan() -> AsyncIterator[State]: ...",
            )
        lifespan = Lifespan(function)
        self.lifespans.append(lifespan)
        return lifespan

    def add_startup(self, function: Callable[[], S]) -> Callable[[], S]:
        """Add a function that each worker calls before it claims. Raises `InvalidInput` when it takes arguments."""
        if not callable(function) or inspect.isasyncgenfunction(function) or inspect.signature(function).parameters:
            raise InvalidInput(
                f"the start-up function {name_of(function)} must be a function without parameters",
                hint="async def warm_up() -> None: ... What has to be cleaned up is a lifespan.",
            )
        check_no_generator(function, f"the start-up function {name_of(function)}")
        self.startups.append(function)
        return function

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the lifespans within the block, and the start-up functions before it."""
        async with AsyncExitStack() as stack:
            for lifespan in self.lifespans:
                await stack.enter_async_context(lifespan.running())
            for startup in self.startups:
                check_ran(await (startup() if is_async(startup) else asyncio.to_thread(startup)), name_of(startup))
            yield

    def around(self, plan: Plan, type: type, middleware: Sequence[Middleware] = ()) -> Around | None:
        """How a handler of work of this type is called: middleware around its dependencies. None: there is neither.

        Args:
            plan: The handler's dependencies.
            type: Class of the work that it takes.
            middleware: Middleware of the handler itself, inside that of the application.
        """
        chain = [*self.middleware, *middleware]
        within = self.dependencies(plan, type)
        if not chain:
            return within

        async def run(work: Any, handler: Callable[[Mapping[str, Any]], Awaitable[Any]]) -> Any:
            async def innermost(work: Any) -> Any:
                return await (handler({}) if within is None else within(work, handler))

            call: CallNext = innermost
            for outer in reversed(chain):
                call = _bound(outer, call)
            return await call(work)

        return run

    def dependencies(self, plan: Plan, type: type) -> Around | None:
        """How a handler of work of this type is called with its dependencies. None: it has none."""
        if not plan:
            return None

        async def run(work: Any, handler: Callable[[Mapping[str, Any]], Awaitable[Any]]) -> Any:
            return await Solver({type: work}, self.dependency_overrides).call(plan, handler)

        return run


def _bound(outer: Middleware, inner: CallNext) -> CallNext:
    async def call(work: Any) -> Any:
        return await outer(work, inner)

    return call
