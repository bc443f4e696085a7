"""The alert rules of deploy/, what causes each alert, and promtool, which evaluates them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.debian import find

RULES = Path(__file__).parents[1] / "deploy" / "prometheus" / "penstock.rules.yaml"
_STEPS = 120
"""Two hours of samples, one a minute."""


def rules(path: Path = RULES) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def series_of(scrapes: Mapping[str, str]) -> dict[str, str]:
    """Scraped samples as series that do not change, by name and labels; those of each process have its name as instance."""
    found = {}
    for instance, text in scrapes.items():
        for line in text.splitlines():
            if sample := re.match(r"(penstock_[a-z_]+)(?:\{(.*)\})? ([0-9.e+-]+)$", line):
                name, labels, value = sample.groups()
                found[f'{name}{{instance="{instance}"' + (f",{labels}" if labels else "") + "}"] = f"{value}+0x{_STEPS}"
    return found


def promtool_test(folder: Path, cases: Sequence[tuple[Mapping[str, str], Sequence[str]]]) -> str:
    """Evaluate the rules on series of two hours. Each case has its series and the alerts that fire at the end.

    Returns what promtool says is otherwise; empty: nothing.
    """
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in given.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "2h",
                    "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing],
                }
            ],
        }
        for given, firing in cases
    ]
    path = folder / "alerts.test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    promtool = find("promtool")
    assert promtool is not None
    done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr
