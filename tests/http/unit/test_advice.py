"""Advice for HTTP: none of the SQL functions' hints reaches a client of HTTP as SQL."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import penstock
from penstock.errors import Conflict, NotFound
from penstock.http.errors import from_penstock
from penstock.http.hints import for_http

FUNCTIONS = Path(penstock.__file__).parent / "postgres" / "schema" / "functions"
HINT = re.compile(r"hint\s*=\s*(?:format\()?'((?:[^']|'')*)'")
HINTS = sorted(
    {
        found.replace("''", "'").replace("%L", "'orders'")
        for path in FUNCTIONS.rglob("*.sql")
        for found in HINT.findall(path.read_text())
    }
)


def test_there_are_hints() -> None:
    assert len(HINTS) > 100
    assert any("select penstock." in hint for hint in HINTS)


@pytest.mark.parametrize("hint", HINTS)
def test_no_hint_speaks_sql(hint: str) -> None:
    advice = for_http(hint) or ""
    assert not re.search(r"penstock\.[a-z]|\bselect\b.*\(|\bp_[a-z]|::|\\d ", advice), advice


def test_what_to_do_is_said_in_http() -> None:
    error = NotFound("no topic orders", hint="Create it first: select penstock.declare_topic('orders');")
    assert from_penstock(error).as_dict()["detail"] == "Create it first: POST /v1/topics, with the name orders"
    paused = Conflict("paused", hint="""Give it a limit: select penstock.change_job_type('a', '{"concurrency": 10}');""")
    assert from_penstock(paused).as_dict()["detail"] == 'Give it a limit: PATCH /v1/jobs/a with {"concurrency": 10}'
