"""Passwords from a function: short-lived ones of a cloud's identity service, or of a vault that rotates them.

The function is asked for each new connection, so a password needs to be valid only while the connection is being opened.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qs, quote, urlsplit

from penstock.errors import DatabaseUnavailable, InvalidInput
from penstock.settings import Settings

Password: TypeAlias = Callable[[], str | Awaitable[str]]
_HINT = "The setting database_password names a function without arguments that returns the password as text."


def has_password(url: str) -> bool:
    """Whether a URL carries its own password."""
    parts = urlsplit(url)
    return parts.password is not None or "password" in parse_qs(parts.query)


def source(settings: Settings) -> Password | None:
    """The function of the setting `database_password`, which is imported when the setting names it.

    Raises:
        InvalidInput: There is no such function.
    """
    given = settings.database_password
    if given is None or callable(given):
        return given
    module, _, name = given.partition(":")
    try:
        folder = str(Path.cwd())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise InvalidInput(f"the setting database_password: {module} cannot be imported: {error}", hint=_HINT) from None
    if not callable(found):
        raise InvalidInput(f"the setting database_password: there is no function {name} in {module}", hint=_HINT)
    return found  # type: ignore[no-any-return]


async def ask(password: Password) -> str:
    """Ask a function for the password. A plain function runs in a thread, since it may wait for a network.

    Raises:
        DatabaseUnavailable: It failed. Its message is left out, since it may contain a secret.
        InvalidInput: It returned something other than text.
    """
    try:
        found: object = password() if inspect.iscoroutinefunction(password) else await asyncio.to_thread(password)
        if inspect.isawaitable(found):
            found = await found
    except Exception as error:
        raise DatabaseUnavailable(
            f"the function that gives the database password failed: {type(error).__name__}",
            hint="Look into its own log; it is asked again for the next connection.",
        ) from None
    if not isinstance(found, str):
        raise InvalidInput(
            f"the function that gives the database password returned a value of type {type(found).__name__}", hint=_HINT
        )
    return found


def with_password(url: str, settings: Settings) -> str:
    """The URL with a password for now, for drivers and programs that take no function. Blocks while the function is asked.

    Raises:
        DatabaseUnavailable, InvalidInput: See `ask`.
    """
    password = source(settings)
    if password is None or has_password(url):
        return url
    with ThreadPoolExecutor(1, "penstock-password") as thread:
        found = thread.submit(asyncio.run, ask(password)).result()
    parts = urlsplit(url)
    query = f"{parts.query}&password={quote(found, safe='')}".removeprefix("&")
    return parts._replace(query=query).geturl()
