"""The command `penstock` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def penstock(
    url: str, *arguments: str, stdin: str = "", cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command against a database, without colours and 200 columns wide.

    Args:
        url: The database.
        arguments: What follows `penstock`.
        stdin: What the command reads.
        cwd: The folder to run it in; None: the current one.
        environment: Further variables.
    """
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url, "NO_COLOR": "1", "COLUMNS": "200", **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        check=False,
    )
