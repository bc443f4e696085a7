"""Parses JSON as Spark does, with repeated names, the digits of numbers, single quotes, and text behind the document.

Python's own parser, in C, does most of the work. Only a text that it refuses and that Spark may accept is parsed by the slow
code here.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BLANK = re.compile(r"[ \t\n\r]*")
_QUOTED = re.compile(r"'((?:[^'\\\x00-\x1f]|\\[^'])*)'")
_PLAIN = re.compile(
    r"(-?(?:0|[1-9][0-9]*))((?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![0-9A-Za-z.+-])|(true|false|null)(?![0-9A-Za-z])"
    r"|(NaN|Infinity|[+-]INF|[+-]Infinity)(?![0-9A-Za-z])"
)
_WORDS = {"true": True, "false": False, "null": None}


class Number(str):
    """The text of a number with a decimal point or an exponent."""

    __slots__ = ()


class Repeated(list[tuple[str, Any]]):
    """The pairs of an object in which a name occurs more than once."""


def decoded(payload: str | bytes, empty: Any) -> Any:
    """The document at the beginning of a payload; `empty` when the payload is blank. Raises `ValueError`."""
    text = payload.decode("utf-8", "replace") if isinstance(payload, bytes) else payload
    at = _BLANK.match(text).end()  # type: ignore[union-attr]
    if at == len(text):
        return empty
    try:
        return _DECODER.raw_decode(text, at)[0]
    except RecursionError:
        raise ValueError("nested too deep") from None
    except ValueError:
        if "'" not in text and "INF" not in text and "+Inf" not in text:
            raise
    try:
        return _Loose(text).value(at)[0]
    except (IndexError, RecursionError):
        raise ValueError("no document") from None


def _object(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    return found if len(found) == len(pairs) else Repeated(pairs)


def _constant(text: str) -> Any:
    return Number({"NaN": "NaN", "Infinity": "inf", "-Infinity": "-inf"}[text])


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=Number, parse_constant=_constant)


class _Loose:
    """Parses one document, which may have single quotes and constants such as NaN and +INF."""

    def __init__(self, text: str) -> None:
        self._text = text

    def value(self, at: int) -> tuple[Any, int]:
        """The value that begins at a place of the text, and the place at which it ends."""
        at = self._skip(at)
        first = self._text[at]
        if first == "{":
            return self._members(at)
        if first == "[":
            return self._elements(at)
        if first in "\"'":
            return self._string(at)
        match = _PLAIN.match(self._text, at)
        if match is None:
            raise ValueError(at)
        whole, rest, word, odd = match.groups()
        if odd is not None:
            return Number("NaN" if odd == "NaN" else "-inf" if odd[0] == "-" else "inf"), match.end()
        if word is not None:
            return _WORDS[word], match.end()
        return Number(whole + rest) if rest else int(whole), match.end()

    def _members(self, at: int) -> tuple[Any, int]:
        pairs: list[tuple[str, Any]] = []
        at = self._skip(at + 1)
        while self._text[at] != "}":
            if pairs:
                at = self._expect(",", at)
            name, at = self._string(self._skip(at))
            value, at = self.value(self._expect(":", self._skip(at)))
            pairs.append((name, value))
            at = self._skip(at)
        return _object(pairs), at + 1

    def _elements(self, at: int) -> tuple[Any, int]:
        found: list[Any] = []
        at = self._skip(at + 1)
        while self._text[at] != "]":
            if found:
                at = self._expect(",", at)
            value, at = self.value(at)
            found.append(value)
            at = self._skip(at)
        return found, at + 1

    def _string(self, at: int) -> tuple[str, int]:
        if self._text[at] == '"':
            return _DECODER.raw_decode(self._text, at)
        match = _QUOTED.match(self._text, at)
        if match is None:
            raise ValueError(at)
        return _DECODER.raw_decode('"' + match[1].replace('"', '\\"') + '"')[0], match.end()

    def _expect(self, sign: str, at: int) -> int:
        if self._text[at] != sign:
            raise ValueError(at)
        return at + 1

    def _skip(self, at: int) -> int:
        return _BLANK.match(self._text, at).end()  # type: ignore[union-attr]
