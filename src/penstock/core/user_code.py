"""Calls of handlers: an exception that a handler raises is the failure of its job or event, and ends neither worker nor loop.

Three kinds of exceptions need attention. Some are not an `Exception` (`sys.exit()`, a subclass of `BaseException`): a task of
asyncio that ends with `SystemExit` or `KeyboardInterrupt` ends the loop, and one that ends with `CancelledError` looks as if it
had been cancelled. A future cannot hold `StopIteration`, so a task that awaits the thread that raised it would wait for ever.
And the exception's `__str__` may raise.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from penstock.core.serialization import plain_text
from penstock.errors import PenstockError

_LONGEST_MESSAGE = 2_000


class OddFailure(RuntimeError):
    """A handler raised what is not an `Exception`, or what a future cannot hold; `__cause__` is what it raised."""


def message_of(error: BaseException) -> str:
    """The message of any exception, as text that PostgreSQL can store."""
    try:
        return plain_text(str(error.message if isinstance(error, PenstockError) else error)[:_LONGEST_MESSAGE])
    except BaseException as failure:
        return f"(the exception's message cannot be read: {type(failure).__name__})"


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
