"""The code, the tests and the documents use the words of docs/glossary.md, not those that they replaced."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# What stands for it today.
REPLACED = {
    "claimer": "fetcher",
    "settler": "completer",
    "tends?|tended|tending": "maintain",
    "sweeps?": "full scan (as a schedule's name it is data)",
    "nobody": "no worker, no handler ... (the user nobody is written `nobody`)",
    "whoever|somebody": "name the subject",
    "anew": "again",
    "in hand": "under way, not settled",
    "vacate[sd]?": "revoke_slots, drain",
    "strays?": "unplaced jobs",
    "keepers?": "supervisor",
    "patience": "idle_timeout, throttle_timeout, autoscale_cooldown",
    "courtesy": "throttle",
    "doors?": "entry, route, authenticator",
    "seats?": "membership",
    "appenders?": "accumulator, producer",
    "feeds": "broadcasts",
    "put aside|puts aside": "quarantined, dead-lettered",
    "set aside": "quarantined, archived as failed",
    "run_ahead": "prefetch_per_key",
    "made up for": "caught up",
    "takes its turn": "is served in turn",
}  # fmt: skip
# The changelog names what was before, and this file the words themselves.
EXEMPT = {"CHANGELOG.md", "tests/docs/unit/test_words.py"}
# The names of things in examples, users of the system, and texts that the tests send are data.
QUOTED = re.compile(r"""b?"[^"\n]*"|'[^'\n]*'|`[^`\n]*`""")
DATA = {"nobody", "somebody", "sweep"}


def texts() -> Iterator[tuple[str, str]]:
    kinds = ("*.py", "*.sql", "*.md")
    folders = ("src", "tests", "docs", "examples", "benchmarks", "scripts")
    found = [path for folder in folders for kind in kinds for path in (ROOT / folder).rglob(kind)]
    assert len(found) > 500
    for path in (*found, *ROOT.glob("*.md")):
        name = str(path.relative_to(ROOT))
        if name in EXEMPT:
            continue
        yield name, path.read_text("utf-8")


def pattern_of(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", re.IGNORECASE)


@functools.cache
def lines_with_words() -> list[tuple[str, int, str]]:
    """The lines that have any of these words: file, number and text. Reading all texts takes longer than any test."""
    pattern = pattern_of("|".join(REPLACED))
    return [
        (name, number, line)
        for name, text in texts()
        if pattern.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("words", REPLACED)
def test_words_that_were_replaced_are_gone(words: str) -> None:
    pattern = pattern_of(words)
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, number, line in lines_with_words()
        if any(match[0].lower() not in DATA or not _is_data(line, match[0], name) for match in pattern.finditer(line))
    ]
    assert not found, f"say {REPLACED[words]} instead:\n" + "\n".join(found)


def _is_data(line: str, word: str, name: str) -> bool:
    """Within quotes of code, or the name of a function or constant in a test."""
    outside = QUOTED.sub("", line)
    return word not in outside or (name.startswith("tests/") and (word.isupper() or f"def {word}" in outside))
