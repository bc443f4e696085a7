"""Dependencies: arguments of a handler that are made for one call, as in FastAPI, and are no part of the payload.

A dependency is a function, plain or async, or a generator that yields once; what follows the `yield` is its clean-up, which runs
when the handler has ended and before its outcome is recorded. The error of the handler is raised at the `yield`. Dependencies may
have dependencies; each is made once for a call. Plain functions run in a thread, like plain handlers.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, update_wrapper, wraps
from types import UnionType
from typing import Annotated, Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload

from pydantic.fields import FieldInfo

from penstock.core.user_code import code_of, is_async
from penstock.errors import InvalidInput

P = ParamSpec("P")
D = TypeVar("D")
R = TypeVar("R")
Overrides: TypeAlias = Mapping[Callable[..., Any], Callable[..., Any]]
_WRITTEN = {"Depends": "Depends(...)", "Security": "Depends(...)"}
_NOT_FILLED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Depends:
    """Marks a parameter as a dependency: `session: Annotated[Session, Depends(get_session)]`.

        async def get_session() -> AsyncIterator[AsyncSession]:
            async with AsyncSession(engine) as session:
                yield session
                await session.commit()

        @app.job
        async def invoice(job: Job[Shipment], session: Annotated[AsyncSession, Depends(get_session)]) -> None: ...

        @app.job
        @inject(get_session)
        async def resize(session: AsyncSession, path: str, width: int) -> None: ...

    Attributes:
        dependency: Function or generator that makes the value. Its own parameters are dependencies, the current work
            (`job: Job`), or have defaults.
        use_cache: Whether the value is made once for each call of the handler, for all that depend on it.
    """

    dependency: Callable[..., Any]
    use_cache: bool = True


@dataclass(frozen=True, slots=True)
class Given:
    """A parameter that takes the work itself: a `Job`, a `Batch`, a `Tick`."""

    type: type


@dataclass(frozen=True, slots=True)
class Plan:
    """How the parameters of one function are filled: by the work itself or by dependencies, by name."""

    parameters: Mapping[str, Depends | Given]

    def __bool__(self) -> bool:
        return bool(self.parameters)


class Injected(Generic[P, R]):
    """A function whose first parameter is filled by a dependency. `inject` makes it."""

    def __init__(self, function: Callable[..., R], depends: Depends) -> None:
        update_wrapper(self, function)  # first, since it copies the attributes of a function that is injected already
        self.function = function
        self.depends = depends

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the function with all of its arguments."""
        return self.function(*args, **kwargs)


@overload
def inject(
    dependency: Callable[..., AsyncIterator[D] | AsyncGenerator[D, Any]],
) -> Callable[[Callable[Concatenate[D, P], R]], Callable[P, R]]: ...
@overload
def inject(
    dependency: Callable[..., Iterator[D] | Generator[D, Any, Any]],
) -> Callable[[Callable[Concatenate[D, P], R]], Callable[P, R]]: ...
@overload
def inject(dependency: Callable[..., Awaitable[D]]) -> Callable[[Callable[Concatenate[D, P], R]], Callable[P, R]]: ...
@overload
def inject(dependency: Callable[..., D]) -> Callable[[Callable[Concatenate[D, P], R]], Callable[P, R]]: ...
def inject(dependency: Callable[..., Any]) -> Any:
    """Fill the first parameter of a handler by a dependency, in a way that type checkers see: the payload is what remains.

    Used below the decorator that declares the handler; of several, the lowest one fills the first parameter.

    Args:
        dependency: See `Depends`.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return Injected(function, Depends(dependency))

    return decorate


def unwrapped(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Depends]]:
    """The function below `inject`, and the dependencies that fill its first parameters, by name."""
    outer_first: list[Depends] = []
    while isinstance(function, Injected):
        outer_first.append(function.depends)
        function = function.function
    names = [name for name, each in signature_of(function).parameters.items() if each.kind not in _NOT_FILLED]
    if len(outer_first) > len(names):
        raise InvalidInput(f"{name_of(function)} has fewer parameters than inject() fills")
    return function, dict(zip(names, reversed(outer_first), strict=False))


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, for messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function.

    Raises:
        InvalidInput: The object is not callable or has none, or a default only describes what it stands for, as in FastAPI.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{function!r:.100} is not a function that can be called: {error}") from None
    for name, parameter in signature.parameters.items():
        default = parameter.default
        if isinstance(default, (Depends, FieldInfo)) or _is_of_fastapi(default):
            raise InvalidInput(
                f"the parameter {name} of {name_of(function)} has {type(default).__name__}(...) as its default",
                hint=f"Write it in the annotation: {name}: Annotated[..., {_WRITTEN.get(type(default).__name__, 'Field(...)')}]",
            )
    return signature


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The resolved annotations of a function or class, with the metadata of `Annotated`.

    Raises:
        InvalidInput: An annotation names something that does not exist at run time.
    """
    target: Any = function
    if inspect.isclass(function):
        target = function.__init__
    elif not inspect.isroutine(function):
        target = getattr(function, "__wrapped__", None) or type(function).__call__
    try:
        # What is local where the function is defined hides what its module has, as in the function itself.
        return typing.get_type_hints(target, localns=_locals_around(target), include_extras=True)
    except NameError:
        pass
    try:
        # A function that is declared inside another one may name what is local there.
        return typing.get_type_hints(target, localns=_locals_of_caller(), include_extras=True)
    except NameError as error:
        raise InvalidInput(
            f"cannot resolve the annotations of {name_of(function)}: {error}",
            hint="Define the types of a handler before it, and import them at run time, not under TYPE_CHECKING.",
        ) from None


def _locals_around(function: Any) -> dict[str, Any] | None:
    """The local names of the call in which a function was defined and is being declared; None: there are none."""
    around, _, _ = getattr(function, "__qualname__", "").rpartition(".<locals>.")
    frame = inspect.currentframe() if around else None
    while frame is not None:
        if frame.f_code.co_qualname == around and frame.f_globals is getattr(function, "__globals__", None):
            return dict(frame.f_locals)
        frame = frame.f_back
    return None


def _locals_of_caller() -> dict[str, Any]:
    """The local names where the application called Penstock."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "penstock":
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def depends_of(annotation: Any) -> Depends | None:
    """The dependency that an annotation names; None when it names none."""
    if typing.get_origin(annotation) is Annotated:
        for extra in annotation.__metadata__:
            if isinstance(extra, Depends):
                return extra
            if _is_of_fastapi(extra):
                raise InvalidInput("Depends of FastAPI says nothing to Penstock", hint="from penstock import Depends")
            if extra is Depends:
                raise InvalidInput("Depends needs the function that makes the value", hint="Depends(get_session)")
    return None


def _is_of_fastapi(marker: object) -> bool:
    """Whether this is a dependency of FastAPI, which is not imported for the question."""
    kind = type(marker)
    return kind.__name__ in {"Depends", "Security"} and kind.__module__.partition(".")[0] == "fastapi"


def bare(annotation: Any) -> Any:
    """An annotation without the metadata of `Annotated`, and without None, which it has for calls of the function by itself."""
    if typing.get_origin(annotation) is Annotated:
        return bare(annotation.__origin__)
    if typing.get_origin(annotation) in (UnionType, typing.Union):
        others = [each for each in typing.get_args(annotation) if each is not type(None)]
        return bare(others[0]) if len(others) == 1 else annotation
    return annotation


def given_of(annotation: Any, givens: tuple[type, ...]) -> Given | None:
    """What of the work itself an annotation names, such as `Job` or `Job | None`; None when it names none of `givens`."""
    annotation = bare(annotation)
    origin = typing.get_origin(annotation) or annotation
    return Given(origin) if inspect.isclass(origin) and origin in givens else None


@lru_cache(maxsize=4_096)
def plan_of(function: Callable[..., Any], givens: tuple[type, ...]) -> Plan:
    """How the parameters of a dependency are filled.

    Args:
        function: The dependency.
        givens: Types of the work itself that the dependency may take.

    Raises:
        InvalidInput: A parameter without a default is neither a dependency nor the work.
    """
    annotations = annotations_of(function)
    found: dict[str, Depends | Given] = {}
    for name, parameter in signature_of(function).parameters.items():
        annotation = annotations.get(name)
        filled = depends_of(annotation) or given_of(annotation, givens)
        if filled is not None:
            found[name] = filled
        elif parameter.default is parameter.empty and parameter.kind not in _NOT_FILLED:
            known = ", ".join(each.__name__ for each in givens)
            raise InvalidInput(
                f"the parameter {name} of the dependency {name_of(function)} cannot be filled",
                hint=f"Annotate it with Depends(...), give it a default, or let it take one of: {known}.",
            )
    return Plan(found)


def check_dependencies(parameters: Mapping[str, Depends | Given], givens: tuple[type, ...], *, blocking: bool = False) -> Plan:
    """The plan of a handler whose parameters are filled like this.

    Args:
        parameters: What fills them.
        givens: Types of the work itself that a dependency may take.
        blocking: Whether no dependency may be async, because they run in a process without an event loop.

    Raises:
        InvalidInput: A dependency cannot be called, or depends on itself.
    """
    for filled in parameters.values():
        if isinstance(filled, Depends):
            _check(filled.dependency, givens, blocking, ())
    return Plan(parameters)


def _check(function: Callable[..., Any], givens: tuple[type, ...], blocking: bool, above: tuple[Callable[..., Any], ...]) -> None:
    if not callable(function):
        raise InvalidInput(f"a dependency must be a function, not {function!r:.100}")
    if function in above:
        raise InvalidInput(f"the dependency {name_of(function)} depends on itself")
    if blocking and (_needs_loop(function) or isinstance(function, RunsOnLoop)):
        raise InvalidInput(
            f"the dependency {name_of(function)} needs an event loop, which a handler in a process does not have",
            hint='Make it a plain function or generator, or leave executor="process" out.',
        )
    for filled in plan_of(function, givens).parameters.values():
        if isinstance(filled, Depends):
            _check(filled.dependency, givens, blocking, (*above, function))


def taking(function: Callable[..., Any], parameter: str) -> Callable[..., Any]:
    """A function whose first argument goes to this parameter, and whose dependencies are given by name."""
    if next(iter(signature_of(function).parameters)) == parameter:
        return function

    @wraps(function)
    def call(argument: Any, /, **dependencies: Any) -> Any:
        return function(**{parameter: argument}, **dependencies)

    return call


def overrides_in(plan: Plan, overrides: Overrides, types: tuple[type, ...]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Those of the functions that stand in for a dependency of a plan, or for one of its dependencies in turn.

    Args:
        plan: Dependencies of a handler.
        overrides: Functions that stand in for dependencies, of any handler.
        types: Types of the work that dependencies may take.
    """
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    left = [plan] if overrides else []
    while left:
        for filled in left.pop().parameters.values():
            if isinstance(filled, Given) or filled.dependency in found:
                continue
            function = overrides.get(filled.dependency, filled.dependency)
            if filled.dependency in overrides:
                found[filled.dependency] = function
            left.append(plan_of(function, types))
    return found


class RunsOnLoop:
    """Base of dependencies that only look something up: they are called where the handler is started, not in a thread."""


def _needs_loop(function: Callable[..., Any]) -> bool:
    return is_async(function) or inspect.isasyncgenfunction(code_of(function))


@dataclass(slots=True)
class Solver:
    """Makes the dependencies of one call of a handler, and cleans up after it.

    Args:
        given: The work itself, by its type.
        overrides: Functions that stand in for dependencies, as tests set them.
    """

    given: Mapping[type, Any]
    overrides: Overrides
    _made: dict[Callable[..., Any], Any] = field(default_factory=dict)

    async def call(self, plan: Plan, handler: Callable[[Mapping[str, Any]], Awaitable[R]]) -> R:
        """Call the handler with its dependencies. Their clean-up can fail the call, but not undo the handler's error."""
        failure: BaseException | None = None
        async with AsyncExitStack() as stack:
            values = {name: await self._value(filled, stack) for name, filled in plan.parameters.items()}
            try:
                result = await handler(values)
            except BaseException as error:
                failure = error
                raise
        if failure is not None:
            raise failure
        return result

    def call_blocking(self, plan: Plan, handler: Callable[[Mapping[str, Any]], R]) -> R:
        """`call` without an event loop, in a process of its own."""
        failure: BaseException | None = None
        with ExitStack() as stack:
            values = {name: self._blocking_value(filled, stack) for name, filled in plan.parameters.items()}
            try:
                result = handler(values)
            except BaseException as error:
                failure = error
                raise
        if failure is not None:
            raise failure
        return result

    async def _value(self, filled: Depends | Given, stack: AsyncExitStack) -> Any:
        if isinstance(filled, Given):
            return self.given[filled.type]
        if filled.use_cache and filled.dependency in self._made:
            return self._made[filled.dependency]
        function = self.overrides.get(filled.dependency, filled.dependency)
        plan = plan_of(function, tuple(self.given))
        arguments = {name: await self._value(inner, stack) for name, inner in plan.parameters.items()}
        value = await self._make(function, arguments, stack)
        if filled.use_cache:
            self._made[filled.dependency] = value
        return value

    async def _make(self, function: Callable[..., Any], arguments: Mapping[str, Any], stack: AsyncExitStack) -> Any:
        call = code_of(function)
        if inspect.isasyncgenfunction(call):
            return await stack.enter_async_context(asynccontextmanager(function)(**arguments))
        if inspect.isgeneratorfunction(call):
            return await stack.enter_async_context(_in_threads(contextmanager(function)(**arguments)))
        if inspect.iscoroutinefunction(call):
            return await function(**arguments)
        if isinstance(function, RunsOnLoop):
            return function(**arguments)
        return await asyncio.to_thread(function, **arguments)

    def _blocking_value(self, filled: Depends | Given, stack: ExitStack) -> Any:
        if isinstance(filled, Given):
            return self.given[filled.type]
        if filled.use_cache and filled.dependency in self._made:
            return self._made[filled.dependency]
        function = self.overrides.get(filled.dependency, filled.dependency)
        plan = plan_of(function, tuple(self.given))
        arguments = {name: self._blocking_value(inner, stack) for name, inner in plan.parameters.items()}
        generator = inspect.isgeneratorfunction(code_of(function))
        value = stack.enter_context(contextmanager(function)(**arguments)) if generator else function(**arguments)
        if filled.use_cache:
            self._made[filled.dependency] = value
        return value


@asynccontextmanager
async def _in_threads(manager: Any) -> AsyncIterator[Any]:
    """A blocking context manager whose two sides run in threads."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    except BaseException as error:
        if not await asyncio.shield(asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__)):
            raise
    else:
        await asyncio.shield(asyncio.to_thread(manager.__exit__, None, None, None))
