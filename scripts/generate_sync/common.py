"""What both ways of generating share: where files are, what a generated one says first, and docstrings."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
NOTICE = "Generated: change what this is generated from, and run `make format` (scripts/generate_sync).\n"


def blocking_words(text: str) -> str:
    """A docstring of asynchronous code, for blocking code."""
    text = re.sub(r"\bAsync(?=[A-Z])", "", text).replace("for asyncio", "for threads")
    text = re.sub(r"\b(?:async|asynchronous) (?=with|for|iterator)", "", text)
    return re.sub(r"\bawait |(?<=\ba)n(?= iterator over)", lambda found: found[0] if found[0] == "n" else "", text)


def path_of(module: str) -> Path:
    """The file of a module."""
    return (SOURCES / module.replace(".", "/")).with_suffix(".py")
