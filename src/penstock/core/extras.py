"""Extras: parts of Penstock whose packages `pip install penstock` leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import MissingExtra


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Import packages of an extra within this context.

    Args:
        extra: Name of the extra, or several with commas.
        what: What needs it, as the subject of a sentence.

    Raises:
        MissingExtra: A package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # A module of Penstock or of the application that does not exist is a fault of another kind.
        if isinstance(error, MissingExtra) or (error.name or "").partition(".")[0] in ("", "penstock"):
            raise
        raise MissingExtra(what, extra, error.name or "") from None
