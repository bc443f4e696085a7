"""Programs of Debian that some tests need, in one place. Installed when that is possible; tests that miss one are skipped.

python -m tests.debian
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "gearmand": "gearman-job-server",
    "gearman": "gearman-tools",
    "pgbouncer": "pgbouncer",
    "chromium": "chromium",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}
"""Programs, and the packages that they come with."""


def missing(*programs: str) -> str:
    """Why a test that needs these programs cannot run; empty when it can."""
    lacking = [program for program in programs if find(program) is None]
    return f"needs {', '.join(sorted({PACKAGES[program] for program in lacking}))} of Debian" if lacking else ""


def find(program: str) -> str | None:
    """Where a program is."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def postgres_bin_dir() -> Path | None:
    """Programs of the newest PostgreSQL of Debian, which compiles plans, unlike that of the wheel. None: there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda program: int(program.parts[-3]))
    return found[-1].parent if found else None


def install() -> str:
    """Install what is missing. Returns why that is not possible; empty when everything is there."""
    packages = sorted({PACKAGES[program] for program in PACKAGES if find(program) is None})
    if not packages:
        return ""
    if shutil.which("apt-get") is None:
        return f"{', '.join(packages)}: there is no apt-get"
    if os.geteuid() != 0:
        return f"{', '.join(packages)}: only root can install them"
    # The servers are started by the tests, not by the machine.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    for attempt in (command, ["apt-get", "update", "-q"], command):
        done = subprocess.run(attempt, env=environment, capture_output=True, text=True, check=False)
        if attempt is command and done.returncode == 0:
            return ""
    reason = (done.stderr.strip().splitlines() or ["apt-get failed"])[-1]
    return f"{', '.join(packages)}: {reason}"


if __name__ == "__main__":
    if reason := install():
        print(f"left out, and the tests that need them are skipped: {reason}", file=sys.stderr)
