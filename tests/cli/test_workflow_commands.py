"""The commands about job groups: children by the name of their group, and the numbers of their ends."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg

from tests.command_line import penstock


def test_children_are_enqueued_listed_and_cancelled_by_the_name_of_their_group(url: str, tmp_path: Path) -> None:
    penstock(url, "types", "create", "step")
    with psycopg.connect(url, autocommit=True) as sql:
        ((group,),) = sql.execute("select penstock.open_group('import')").fetchall()
    assert penstock(url, "enqueue", "step", '"one"', "--group", "import").returncode == 0
    lines = tmp_path / "lines"
    lines.write_text(f'{{"data": "two"}}\n{{"data": "three", "group": "{group}"}}\n')
    assert penstock(url, "enqueue", "step", "--file", str(lines), "--group", str(group)).returncode == 0
    penstock(url, "enqueue", "step", '"other"')
    listed = json.loads(penstock(url, "jobs", "list", "--workflow", "import", "--json").stdout)
    assert sorted((job["data"], job["workflow"]) for job in listed) == [(data, str(group)) for data in ("one", "three", "two")]
    previewed = penstock(url, "jobs", "cancel", "--all-matching", "--workflow", "import", "--dry-run")
    assert "cancel would apply to 3 jobs" in previewed.stdout
    lines.write_text('{"data": "two", "group": "import"}\n')
    refused = penstock(url, "enqueue", "step", "--file", str(lines))
    assert refused.returncode != 0
    assert "group 'import' is not the id of a job group" in refused.stderr


def test_children_that_expired_are_counted_by_themselves(url: str) -> None:
    penstock(url, "types", "create", "step")
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute("select penstock.open_group('import', p_on_failure => 'continue')")
        sql.execute("update penstock.job_groups set added = 9, succeeded = 4, failed = 3, cancelled = 2, expired = 1")
    (row,) = [line for line in penstock(url, "workflows", "list").stdout.splitlines() if "import" in line]
    assert row.split()[:7] == ["import", "open", "9", "4", "3", "2", "1"]
