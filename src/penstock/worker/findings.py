"""Findings: what the checks of `penstock doctor` answer with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from penstock.core.records import example

Level = Literal["ok", "warning", "problem"]
MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        check: Name of the check.
        level: ok, warning or problem.
        message: What is so.
        advice: What to do about it; None: nothing.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "check": "workers", "level": "problem", "message": "3 jobs of invoice-shipments wait, and no worker works on this type",
        "advice": "Start one: penstock worker MODULE:APP. If one runs: does its application declare a handler for this type?",
    })  # fmt: skip

    check: str
    level: Level
    message: str
    advice: str | None = None


def worst(findings: Sequence[Finding]) -> Level:
    """The highest level of the findings."""
    levels = {finding.level for finding in findings}
    return "problem" if "problem" in levels else "warning" if "warning" in levels else "ok"


def first(findings: list[Finding]) -> list[Finding]:
    """The first ten findings of one kind about job types, and how many more there are: thousands would hide all others."""
    rest = len(findings) - MOST_NAMED
    if rest <= 0:
        return findings
    more = f"the same holds for {rest} more job types"
    return [*findings[:MOST_NAMED], replace(findings[-1], message=more, advice="See penstock stats and penstock types list.")]


def named(names: Sequence[Any]) -> str:
    """The first ten names as text, and how many more there are."""
    shown = ", ".join(str(name) for name in names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"
