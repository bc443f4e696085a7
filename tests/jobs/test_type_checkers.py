"""What type checkers see of an application: all right uses pass, and each wrong one is refused, by mypy and by basedpyright."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPED = Path(__file__).parent / "typed" / "declarations.py"


def wrong_lines() -> set[int]:
    return {number for number, line in enumerate(TYPED.read_text().splitlines(), 1) if line.endswith("# wrong")}


def test_mypy_accepts_right_uses_and_refuses_wrong_ones(tmp_path: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", tmp_path, "--no-error-summary", TYPED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = {int(line) for line in re.findall(r"^\S+declarations\.py:(\d+): error", checked.stdout, re.MULTILINE)}
    assert errors == wrong_lines(), checked.stdout + checked.stderr


@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_basedpyright_accepts_right_uses_and_refuses_wrong_ones(tmp_path: Path, version: str) -> None:
    config = {"include": [str(TYPED)], "typeCheckingMode": "standard", "pythonVersion": version}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    checked = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "--project", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(checked.stdout)["generalDiagnostics"]
    errors = {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}
    assert errors == wrong_lines(), [(each["range"]["start"]["line"] + 1, each["message"]) for each in found]
