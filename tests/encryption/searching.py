"""The search for the words of `searched_app`, in files and in values."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from tests.encryption.searched_app import BEGINNING, WORDS


def traces(word: str) -> list[bytes]:
    """A word as text, as UTF-16, and as each base64 of a text that contains it."""
    plain = word.encode()
    encoded = [base64.b64encode(b"x" * shift + plain)[4 if shift else 0 : -4] for shift in range(3)]
    return [plain, word.encode("utf-16-le"), word.encode("utf-16-be"), *encoded]


def found_in(contents: Iterable[bytes]) -> set[str]:
    """The words that are in contents."""
    # All words begin alike, so that most contents are searched for their beginning alone.
    likely = [content for content in contents if any(trace in content for trace in traces(BEGINNING))]
    return {word for word in WORDS for trace in traces(word) if any(trace in content for content in likely)}


def files_of(folder: Path) -> list[bytes]:
    """The contents of all files below a folder."""
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
