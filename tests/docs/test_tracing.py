"""The code of docs/tracing.md runs as it stands there. In a process of its own, for which Sentry and OpenTelemetry are set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.docs.snippets import blocks

PAGE = Path(__file__).parents[2] / "docs/tracing.md"
SECRET = "s3cret-in-the-payload"
RUN = f"""
import asyncio, json, os
import asyncpg
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.transport import Transport
from penstock.testing import running_worker

sent, exporter = [], InMemorySpanExporter()
provider.add_span_processor(SimpleSpanProcessor(exporter))

class Kept(Transport):
    def capture_envelope(self, envelope):
        sent.append(envelope.serialize().decode())

sentry_sdk.init(dsn="https://key@sentry.example.com/1", include_local_variables=False, transport=Kept)

@app.job("fails", max_attempts=1)
async def fails(job: Job[str]) -> None:
    payload = job.data
    raise LookupError("no such order")

@app.job("puts-off", max_attempts=1)
async def puts_off(job: Job[str]) -> None:
    raise Retry("later")

async def main():
    async with app:
        connection = await asyncpg.connect(os.environ["PENSTOCK_DATABASE_URL"])
        await connection.execute(SQL)
        await connection.close()
        await fails.enqueue({SECRET!r})
        await puts_off.enqueue({SECRET!r})
        async with running_worker(app):
            while len([span for span in exporter.get_finished_spans() if span.name.startswith("process")]) < 3:
                await asyncio.sleep(0.02)
    sentry_sdk.flush()
    spans = [[span.name, f"{{span.context.trace_id:032x}}"] for span in exporter.get_finished_spans()]
    with open("shown.json", "w") as file:
        json.dump({{"sent": sent, "spans": spans}}, file)

asyncio.run(main())
"""


def test_the_page_runs_and_sentry_gets_the_error_and_no_payload(url: str, tmp_path: Path) -> None:
    found = blocks(PAGE)
    runs = [block for block in found if not block.not_run]
    assert [block.language for block in runs] == ["python", "sql", "python"]
    switch_on, sql, sentry = (block.code for block in runs)
    program = tmp_path / "page.py"
    program.write_text(f"{switch_on}\n{sentry}\nSQL = {sql!r}\n{RUN}")
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url}
    subprocess.run(
        [sys.executable, str(program)], env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True, timeout=60
    )
    shown = json.loads((tmp_path / "shown.json").read_text())
    # The attempt that puts itself off is none that failed.
    (event,) = shown["sent"]
    assert '"LookupError"' in event
    assert '"job_type":"fails"' in event
    traces = dict(shown["spans"])
    assert f'"trace_id":"{traces["process fails"]}"' in event
    assert traces["process ship"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert SECRET not in event
