"""Masking: which parts of payloads a user may see.

A rule names a field, such as `iban` (wherever it stands), `customer.email` (a path from the top of the payload),
`invoices:iban` (in payloads of this job type) or `invoices:*` (everything in jobs of this type, what handlers raised and
logged included, since it may hold anything). Rules hold for users below the role that sees everything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from penstock.core.serialization import load_json
from penstock.errors import Unreadable

MASK = "•••"


@dataclass(frozen=True, slots=True)
class Rule:
    """A field that is masked. `name` None: in jobs of every type; `path` empty: everything."""

    name: str | None
    path: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Rule:
        """A rule from its text. Raises `ValueError`."""
        name, colon, field = text.rpartition(":")
        path = () if field == "*" else tuple(field.split("."))
        if not field or "" in path or (colon and not name) or (field == "*" and not colon):
            raise ValueError(
                f"{text!r} is no field to mask: write iban, customer.email, invoices:iban or invoices:*, with commas"
            )
        return cls(name or None, path)


@dataclass(frozen=True, slots=True)
class Masking:
    """What is masked for one user.

    Attributes:
        rules: The rules; none: the user sees everything.
    """

    rules: tuple[Rule, ...] = ()

    def hides_all(self, name: str) -> bool:
        """Whether nothing of the payloads of this job type is shown."""
        return any(not rule.path for rule in self._of(name))

    def hides_words(self, name: str | None) -> bool:
        """Whether what handlers raised is hidden, in jobs of this type or, with None, of any."""
        return any(not rule.path for rule in (self.rules if name is None else self._of(name)))

    def hides(self, name: str | None, path: tuple[str, ...]) -> bool:
        """Whether a field is masked, in jobs of this type or, with None, of any. Its path may have indexes into lists."""
        rules = self.rules if name is None else self._of(name)
        return any(not rule.path or _reached(rule.path, path) for rule in rules)

    def masks(self, name: str) -> bool:
        """Whether anything is masked in jobs of this type."""
        return bool(self._of(name))

    def shown(self, name: str, value: Any) -> Any:
        """A document with the masked fields replaced."""
        rules = self._of(name)
        if not rules or value is None:
            return value
        return MASK if any(not rule.path for rule in rules) else _masked(value, rules, ())

    def json_of(self, name: str, value: Any) -> str:
        """A document as JSON text with the masked fields replaced; the mask alone for one that is nested too deeply."""
        try:
            text = json.dumps(self.shown(name, value), ensure_ascii=False, separators=(",", ":"))
        except RecursionError:
            return MASK
        return text.encode("utf-8", "replace").decode()

    def json_text(self, name: str, text: str) -> str:
        """The same of a JSON text, which stays as it is where nothing is masked."""
        if not self.masks(name):
            return text
        try:
            return self.json_of(name, load_json(text))
        except Unreadable:
            return MASK

    def text(self, name: str, text: str | None) -> str | None:
        """Words of a handler, which cannot be masked in part."""
        return MASK if text is not None and self.hides_all(name) else text

    def _of(self, name: str) -> tuple[Rule, ...]:
        # Dead letters are events of their stream.
        names = (None, name, name.removesuffix(".dead"))
        return tuple(rule for rule in self.rules if rule.name in names)


def _masked(value: Any, rules: tuple[Rule, ...], path: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {
            field: MASK if any(_meets(rule.path, (*path, field)) for rule in rules) else _masked(part, rules, (*path, field))
            for field, part in value.items()
        }
    if isinstance(value, list):
        # The elements of a list have the path of the list.
        return [_masked(part, rules, path) for part in value]
    return value


def _meets(rule: tuple[str, ...], path: tuple[str, ...]) -> bool:
    return path == rule or (len(rule) == 1 and path[-1] == rule[0])


def _reached(rule: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether a path leads to or into what a rule masks. A number may be an index into a list."""
    if len(rule) == 1:
        return rule[0] in path
    places = {0}
    for part in path:
        following = {place + 1 for place in places if place < len(rule) and part == rule[place]}
        places = following | places if _is_index(part) else following | ({len(rule)} & places)
    return len(rule) in places


def _is_index(part: str) -> bool:
    try:
        int(part)
    except ValueError:
        return False
    return True
