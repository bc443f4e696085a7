"""`penstock worker --metrics` in processes of its own, and what it shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.plain_http import NO_CERTIFICATES


def value_of(text: str, sample: str) -> float:
    """The value of a sample in a scrape; 0: it is not there."""
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.M)
    return float(found[1]) if found else 0.0


class Running:
    """`penstock worker --metrics` in processes of its own."""

    def __init__(self, process: subprocess.Popen[str], address: str, lines: list[dict[str, Any]]) -> None:
        self.process = process
        self.address = address
        self.lines = lines

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.address + path, timeout=60, verify=NO_CERTIFICATES)

    def value(self, sample: str) -> float:
        """The value of a sample; 0: it is not there."""
        return value_of(self.get("/metrics").text, sample)

    @property
    def workers(self) -> list[str]:
        return [line["worker"] for line in self.lines if line["event"] == "worker_started"]


@contextmanager
def measured_worker(url: str, folder: Path, source: str, *options: str, **environment: str) -> Iterator[Running]:
    """A worker of the application `app` in `source`, which ends with the block."""
    (folder / "shop.py").write_text(source)
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "shop:app", "--metrics", ":0", "--log", "json", *options],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines: list[dict[str, Any]] = []
    try:
        address = ""
        for line in process.stdout:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "metrics_served":
                address = lines[-1]["url"].removesuffix("/metrics")
                break
        output = process.stdout
        reader = threading.Thread(target=lambda: lines.extend(json.loads(line) for line in output), daemon=True)
        reader.start()
        yield Running(process, address, lines)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
