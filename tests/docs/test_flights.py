"""The flights on a stream, with few of them: fewer batches than consumers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_thousand_flights_are_followed_on_a_stream(url: str) -> None:
    program = "import asyncio; from examples.flights import stream; asyncio.run(stream.main(1000))"
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-3000:]
    assert "1,000 legs, each once" in done.stdout
