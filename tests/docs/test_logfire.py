"""The code about Logfire in docs/tracing.md runs as it stands there.

Logfire's package hooks into every process that has pydantic, so it is no part of the environment of the tests: it gets a folder,
which one process has in its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import blocks

pytestmark = pytest.mark.soak
PAGE = Path(__file__).parents[2] / "docs/tracing.md"
SECRET = "s3cret-in-the-payload"
BEFORE = """
from typing import Any

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock import Job, Penstock, Settings

exporter = InMemorySpanExporter()
app = Penstock(settings=Settings(traces=True))
"""
AFTER = f"""
import asyncio
import json

from penstock.testing import running_worker


@app.job("ship")
async def ship(job: Job[str]) -> None: ...


@app.job("fails", max_attempts=1)
async def fails(job: Job[str]) -> None:
    payload = job.data
    raise LookupError("no such order")


async def main():
    async with app:
        await ship.enqueue({SECRET!r})
        await fails.enqueue({SECRET!r})
        async with running_worker(app):
            while len([span for span in exporter.get_finished_spans() if span.name.startswith("process")]) < 2:
                await asyncio.sleep(0.02)
    with open("shown.json", "w") as file:
        json.dump([json.loads(span.to_json()) for span in exporter.get_finished_spans()], file)


asyncio.run(main())
"""
CONFIGURE = 'logfire.configure(service_name="shop"'


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logfire")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        str(folder),
        "logfire>=4",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the package logfire: {done.stderr.strip().splitlines()[-1]}")
    return folder


def test_spans_of_handlers_go_to_logfire_with_those_of_the_application_within(url: str, packages: Path, tmp_path: Path) -> None:
    (code,) = [block.code for block in blocks(PAGE) if "import logfire" in block.code]
    assert CONFIGURE in code
    # It sends nothing to anybody, and what it would send is kept.
    kept = f"{CONFIGURE}, send_to_logfire=False, console=False, additional_span_processors=[SimpleSpanProcessor(exporter)]"
    program = tmp_path / "page.py"
    program.write_text(BEFORE + code.replace(CONFIGURE, kept) + AFTER)
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "PYTHONPATH": str(packages)}
    subprocess.run(
        [sys.executable, str(program)], env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True, timeout=120
    )
    spans = json.loads((tmp_path / "shown.json").read_text())
    by_id = {span["context"]["span_id"]: span for span in spans}
    within = {by_id[span["parent_id"]]["name"] for span in spans if span["name"] == "work of the shop"}
    assert within == {"process ship", "process fails"}
    assert {span["name"] for span in spans} >= {"enqueue ship", "enqueue fails"}
    (failed,) = [span for span in spans if span["name"] == "process fails"]
    assert failed["attributes"]["error.type"] == "LookupError"
    assert SECRET not in json.dumps(spans)
    # As the page says, the span of Logfire has the message of the exception.
    with_message = {span["name"] for span in spans if "no such order" in json.dumps(span)}
    assert with_message == {"work of the shop"}
