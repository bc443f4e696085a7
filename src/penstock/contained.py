"""Handlers are others' code: whatever one raises is the failure of what it handles, and ends neither a worker nor the loop.

An exception may be none (`sys.exit()`, a class of one's own below `BaseException`): a task of asyncio that ends with `SystemExit`
or `KeyboardInterrupt` ends the loop, and one that ends with `CancelledError` looks as if somebody had stopped it. It may be one
that no future holds (`StopIteration`, in a thread), so that whoever waits for it waits for ever. And it may fail to say
its message.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from penstock.errors import PenstockError
from penstock.payload import plain_text

_LONGEST_MESSAGE = 2_000


class OddFailure(RuntimeError):
    """A handler raised what is no `Exception`, or what cannot travel; `__cause__` is what it raised."""


def message_of(error: BaseException) -> str:
    """The message of any exception, as a text that can be stored."""
    try:
        return plain_text(str(error.message if isinstance(error, PenstockError) else error)[:_LONGEST_MESSAGE])
    except BaseException as failure:
        return f"(its message cannot be had: {type(failure).__name__})"


@contextmanager
def contained() -> Iterator[None]:
    """What a handler raises within comes out as an `Exception`, except when the task itself is being cancelled."""
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
    """Call a handler in a thread. Its error is handed over as a value, since a future cannot hold every exception."""
    try:
        return handler(*arguments), None
    except StopIteration as error:
        odd = OddFailure("the handler raised StopIteration")
        odd.__cause__ = error
        return None, odd
    except BaseException as error:
        return None, error


async def in_thread(threads: Executor, handler: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plain handler in a thread, with the context of the caller. Raises what it raised."""
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    result, raised = await loop.run_in_executor(threads, context.run, call_plain, handler, *arguments)
    if raised is not None:
        raise raised
    return result
