"""The pages name every error that the SQL functions and the HTTP API answer with."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "src" / "penstock"


def test_the_page_of_sql_lists_every_state_that_functions_raise() -> None:
    raised = {state for file in SOURCES.rglob("*.sql") for state in re.findall(r"'(PS\d{3})'", file.read_text("utf-8"))}
    listed = re.findall(r"^\| (PS\d{3}) \|", (ROOT / "docs" / "sql.md").read_text("utf-8"), re.MULTILINE)
    assert len(raised) >= 7
    assert sorted(raised) == sorted(listed)
