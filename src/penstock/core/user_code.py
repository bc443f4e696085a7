"""Calls of handlers: an exception that a handler raises is the failure of its job or event, and ends neither worker nor loop.

Three kinds of exceptions need attention. Some are not an `Exception` (`sys.exit()`, a subclass of `BaseException`): a task of
asyncio that ends with `SystemExit` or `KeyboardInterrupt` ends the loop, and one that ends with `CancelledError` looks as if it
had been cancelled. A future cannot hold `StopIteration`, so a task that awaits the thread that raised it would wait for ever.
And the exception's `__str__` may raise.

A call that returns a coroutine or a generator has run nothing of the code in it. Its work must not count as done.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from datetime import timedelta
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from penstock.core.serialization import plain_text
from penstock.errors import Fail, InvalidDelay, InvalidInput, KeyMissing, PenstockError, Retry, Snooze

_LONGEST_MESSAGE = 2_000
_NOT_RUN = {CoroutineType: "a coroutine", GeneratorType: "a generator", AsyncGeneratorType: "an async generator"}


class OddFailure(RuntimeError):
    """A handler raised what is not an `Exception`, or what a future cannot hold; `__cause__` is what it raised."""


def code_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a call of this runs: the function in a `functools.partial`, the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    called: Callable[..., Any] = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    return called


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a handler runs on the event loop, also as a `functools.partial` or as an object with an async `__call__`."""
    return inspect.iscoroutinefunction(code_of(function))


def check_no_generator(function: Callable[..., Any], name: str) -> None:
    """Refuse a handler that yields, of which a call would run nothing. Raises `InvalidInput`."""
    code = code_of(function)
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise InvalidInput(
            f"{name} yields, so that a call of it would run nothing", hint="Return the result. A dependency may yield, once."
        )


def check_ran(answer: object, what: str) -> None:
    """Refuse the answer of a handler that has run nothing. Raises `InvalidInput`.

    Args:
        answer: What the handler returned.
        what: What the handler is of.
    """
    kind = _NOT_RUN.get(type(answer))
    if kind is None:
        return
    if isinstance(answer, (CoroutineType, GeneratorType)):
        answer.close()
    raise InvalidInput(
        f"the handler of {what} returned {kind}, of which nothing has run",
        hint="Await the call in an async def handler. What decorates an async function has to be async too.",
    )


def message_of(error: BaseException) -> str:
    """The message of any exception, as text that PostgreSQL can store."""
    try:
        return plain_text(str(error.message if isinstance(error, PenstockError) else error)[:_LONGEST_MESSAGE])
    except BaseException as failure:
        return f"(the exception's message cannot be read: {type(failure).__name__})"


def verdict_of(error: BaseException) -> BaseException:
    """The error that says what becomes of the work: this one, or of a group, as a task group raises it, the one that decides.

    What is final decides before other errors. `Retry` and `Snooze` decide when nothing else went wrong, the longest of them.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves: list[BaseException] = []
    groups: list[BaseExceptionGroup[BaseException]] = [error]
    while groups:
        for each in groups.pop().exceptions:
            if isinstance(each, BaseExceptionGroup):
                groups.append(each)
            else:
                leaves.append(each)
    return max(leaves, key=_weight)


def is_final(error: BaseException) -> bool:
    """Whether a further attempt cannot help.

    Another worker may have a key that is missing here, or this one may get it. The next attempt may compute a possible delay.
    """
    return isinstance(error, (Fail, InvalidInput)) and not isinstance(error, (InvalidDelay, KeyMissing))


def _weight(error: BaseException) -> tuple[int, timedelta]:
    if isinstance(error, Snooze):
        return 0, error.duration
    if isinstance(error, Retry):
        return 1, error.after or timedelta(0)
    return 4 if isinstance(error, Fail) else 3 if is_final(error) else 2, timedelta(0)


@contextmanager
def contained() -> Iterator[None]:
    """Turn what a handler raises within into an `Exception`, except when the task itself is being cancelled."""
    try:
        yield
    except Exception:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise OddFailure("the handler raised CancelledError") from error
    except BaseException as error:
        raise OddFailure(f"the handler raised {type(error).__name__}") from error


def call_plain(handler: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Call a handler in a thread. Its error is returned as a value, since a future cannot hold every exception."""
    try:
        return handler(*arguments), None
    except StopIteration as error:
        odd = OddFailure("the handler raised StopIteration")
        odd.__cause__ = error
        return None, odd
    except BaseException as error:
        return None, error


async def in_thread(threads: Executor, handler: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plain handler in a thread, with the context of the caller. Raises what the handler raises."""
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    result, raised = await loop.run_in_executor(threads, context.run, call_plain, handler, *arguments)
    if raised is not None:
        raise raised
    return result
