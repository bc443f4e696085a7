"""The patterns of the variable parts of error messages, and the signs that replace them.

Messages with the same cause are equal after the replacement, which makes them a signature. Java and Python both support the
syntax of the patterns: the history pipeline replaces in Spark, and what settles a failed attempt does it here, so that failures
can be grouped without Spark.

The replacement takes some tens of microseconds. The errors of thousands of jobs that fail together are signed in slices, between
which the event loop goes on, and what several have in common is done once.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import orjson

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_ENDINGS = "com|net|org|io|dev|app|cloud|internal|local|localdomain|lan|intranet|svc|test|example|invalid|eu|uk|de|fr|nl|ch|us"
_FILES = "py|js|ts|java|go|rb|rs|c|cc|cpp|h|php|sql|sh|json|ya?ml|xml|html|txt|log|csv"
_UNITS = "ns|us|µs|ms|s|sec|m|min|h|hr|d"
_JSON = (r"\{\s*(?:[\"'][^{}]*)?\}", "<json>")

# The patterns are applied in this order.
VARYING = (
    (r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}", "<id>"),
    (r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b", "<mail>"),
    (r"\b\w+://[^\s'\"]+", "<url>"),
    (r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?( ?(Z|UTC|GMT)| ?[+-]\d{2}:?\d{2})?)?", "<time>"),
    (r"\b\d{1,2}[/ ][A-Z][a-z]{2}[/ ]\d{4}[: ]\d{2}:\d{2}:\d{2}( ?(Z|UTC|GMT)| ?[+-]\d{4})?", "<time>"),
    (r"\b[A-Z][a-z]{2} +\d{1,2} \d{2}:\d{2}:\d{2}\b", "<time>"),
    # JSON, from the inside out.
    _JSON,
    _JSON,
    _JSON,
    _JSON,
    # Addresses, with their ports: hardware, IPv6, IPv4; then hosts.
    (r"(?<![\w:-])[0-9a-fA-F]{2}([:-][0-9a-fA-F]{2}){5}(?![\w:-])", "<address>"),
    (r"\[(?=[^\]\s]*:[^\]\s]*:)[0-9a-fA-F:.]+(%\w+)?\](:\d{1,5}\b)?", "<address>"),
    (
        r"(?<![\w:.])(?=[^\s\]]*\d)(?=[0-9a-fA-F:]*::|([0-9a-fA-F]{1,4}:){7})[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){2,7}(\.\d{1,3}){0,3}"
        r"(%\w+)?(/\d{1,3})?(?![\w:])",
        "<address>",
    ),
    (r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(:\d{1,5}\b|/\d{1,2}\b)?(?![\w]|\.\d)", "<address>"),
    (r"\b\d{1,2}:\d{2}:\d{2}([.,]\d+)?\b", "<time>"),
    (rf"(?<![\w.@/-])({_LABEL}\.)+({_ENDINGS})(:\d{{1,5}}\b)?(?![\w-]|\.\w)", "<host>"),
    (
        rf"(?<![\w.@/-])(?![\w.-]+\.({_FILES}):)(localhost|[a-zA-Z][a-zA-Z0-9-]*(\.{_LABEL})+|[a-zA-Z][a-zA-Z0-9]*-[a-zA-Z0-9-]*\d[a-zA-Z0-9-]*)"
        r":\d{2,5}\b",
        "<host>",
    ),
    (r"(?<![\w<])[A-Za-z]:\\[^\s'\",;:]+", "<path>"),
    (r"(?<![\w<])(/[\w.@+-]+){2,}/?", "<path>"),
    # Quoted text, but not from one apostrophe to the next; and the values that PostgreSQL names of a key.
    (r"(?<!\w)'[^']*'(?!\w)|\"(?:[^\"\\]|\\.)*\"|`[^`]*`|\u201c[^\u201d]*\u201d|\u2018[^\u2019]*\u2019", "<text>"),
    (r"(?<=\)=)\([^)]*\)", "(<text>)"),
    (r"\b0x[0-9a-fA-F]+\b|\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b", "<hex>"),
    # Ids with a prefix (cus_8Kd02kfL), ULIDs, AWS' ids.
    (r"\b[a-z]{2,8}_(?=[a-zA-Z]*\d)(?=\d*[a-zA-Z])[0-9A-Za-z]{8,}\b", "<id>"),
    (r"\b(?=[A-Z]*\d)(?=\d*[A-Z])[0-9A-Z]{16,}\b", "<id>"),
    (rf"(?<![\w.])(\d+(\.\d+)?({_UNITS}))+(?!\w)", "<duration>"),
    # A number, also with a unit, but not the digits of a word such as B6. The digits of a name such as user_17 are variable.
    (r"(?<![\w.])(\d{1,3}(,\d{3})+|\d+)(\.\d+)*([eE][+-]?\d+)?([kKMGT]i?[bB]|[bB]|%)?(?!\w)", "<n>"),
    (r"(?<=[a-zA-Z]_)\d+(?!\w)", "<n>"),
    # Lists of any length.
    (r"(<\w+>)(\s*,\s*\1)+", "$1, ..."),
)


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern, compiled once."""
    return re.compile(pattern)


@cache
def patterns() -> list[tuple[re.Pattern[str], str]]:
    """The patterns, compiled, each with its sign as Python writes it."""
    return [(compiled(pattern), sign.replace("$1", r"\1")) for pattern, sign in VARYING]


async def compiled_in_slices() -> None:
    """Compile the patterns, unless they are; other tasks run after each of them.

    All of them together take some milliseconds, several times as many on a busy machine. Most processes sign no error, so they
    are not compiled at the import.
    """
    if not patterns.cache_info().currsize:
        for pattern, _ in VARYING:
            compiled(pattern)
            await asyncio.sleep(0)
        patterns()


# So many errors, or messages with so many characters, hold the event loop for some milliseconds.
SLICE, SLICE_CHARACTERS = 32, 2_000
# As long as the messages that a worker writes; a client may send longer ones.
_LONGEST_LINE = 2_000


def normalised(message: str) -> str:
    """The first line of a message, with signs for numbers, ids, times, addresses, hosts, paths, quoted text and JSON."""
    return normalised_line(message.lstrip().split("\n", 1)[0][:_LONGEST_LINE])


@lru_cache(maxsize=2048)
def normalised_line(line: str) -> str:
    """A line of a message, as `normalised` makes it; those of the last messages are remembered."""
    for pattern, sign in patterns():
        line = pattern.sub(sign, line)
    return line


def signature_of(type: str, message: str) -> str:
    """The signature of an error, as the history pipeline has it: of its type and its normalised message."""
    return hashlib.md5(f"{type}\n{normalised(message)}".encode(), usedforsecurity=False).hexdigest()[:16]


def signed(error: str, version: str | None = None, signature: Callable[[str, str], str] = signature_of) -> str:
    """An error of an attempt, JSON text, with its signature and the version of the code, unless it has them.

    What is no object, and what has no message that can be read, such as an encrypted error, stays as it is: the database makes
    its signature of its type.
    """
    try:
        found = orjson.loads(error)
    except orjson.JSONDecodeError:
        # The database accepts more than orjson does, and refuses what is no JSON.
        return error
    if not isinstance(found, dict) or not isinstance(message := found.get("message"), str):
        return error
    if not isinstance(kind := found.get("type", "Error"), str):
        return error
    added = {"signature": signature(kind, message)} | ({} if version is None else {"version": version})
    more = {name: value for name, value in added.items() if name not in found}
    # The text stays, since not every number of JSON is one of Python.
    return f"{orjson.dumps(more).decode()[:-1]},{error.lstrip()[1:]}" if more else error


async def signed_in_slices(errors: Sequence[str | None], version: str | None = None) -> list[str | None]:
    """The errors of a batch, each as `signed` makes it. None: there is none.

    Each error, and each message of a type, is looked at once, however many have it. Other tasks run after `SLICE` errors, and
    after `SLICE_CHARACTERS` of messages, since a long one takes as much time as many short ones.
    """
    known: dict[str, str] = {}
    errors_left, characters_left = SLICE, SLICE_CHARACTERS

    @cache
    def signature(type: str, message: str) -> str:
        nonlocal characters_left
        characters_left -= min(len(message), _LONGEST_LINE)
        return signature_of(type, message)

    if any(error is not None for error in errors):
        await compiled_in_slices()
    for error in errors:
        if error is None or error in known:
            continue
        if errors_left <= 0 or characters_left <= 0:
            await asyncio.sleep(0)
            errors_left, characters_left = SLICE, SLICE_CHARACTERS
        known[error] = signed(error, version, signature)
        errors_left -= 1
    return [None if error is None else known[error] for error in errors]
