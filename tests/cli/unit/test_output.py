"""What commands print for people: values as they are, and the pauses of a screen that is shown again and again."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

import pytest

from penstock.cli.output import out, print_table
from penstock.cli.top import pause_after
from penstock.cli.workflows import print_run
from penstock.workflows.models import WorkflowRunRecord

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_a_value_with_brackets_is_printed_as_it_is() -> None:
    with out.capture() as printed:
        print_table(["[key]", "n"], [("[/x]", 1), ("[bold]", 2)], empty="")
        print_table(["key"], [], empty="no [keys]")
    text = printed.get()
    assert all(word in text for word in ("[key]", "[/x]", "[bold]", "no [keys]")), text


def test_a_run_of_a_workflow_with_brackets_is_printed_as_it_is() -> None:
    run = WorkflowRunRecord(uuid4(), "[a]", "[/b]", "running", "cancel", NOW, None, None, "[red]", "[/red]", 0, 0, 0, 0, 0, 0)
    with out.capture() as printed:
        print_run(run, [])
    text = printed.get()
    assert all(word in text for word in ("[a]", "[/b]", "retry of [red]")), text


@pytest.mark.parametrize(
    ("cost_s", "failed", "pause_s"), [(0.001, False, 3.0), (0.5, False, 50.0), (20.0, False, 300.0), (10.0, True, 3.0)]
)
def test_the_screen_is_never_old_for_long(cost_s: float, failed: bool, pause_s: float) -> None:
    assert pause_after(cost_s, failed=failed) == pause_s
