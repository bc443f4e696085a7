"""Run the pipeline for a day of the flights, with a worker in this process.

    python -m examples.nightly [DAY]      2013-01-01 without an argument

In an application a schedule starts it: `@app.cron("0 4 * * *")` on a function that calls `await nightly(...).start(id=...)`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from examples.nightly.steps import app, nightly


async def main(day: str) -> None:
    """Start the run of a day, once, and print its steps when it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        async with app:
            worker = await app.worker()
            working = asyncio.create_task(worker.run())
            try:
                run = await nightly(day, Path(folder)).start(id=f"nightly-{day}")
                if (before := await app.find_workflow_run(run)).finished_at is not None:
                    print(f"{before.name} was run before, and is not run again")
                ended = await app.wait_for_workflow(run, timeout=timedelta(minutes=5))
                for step in await app.workflow_steps(run):
                    print(f"{step.name}: {step.status}{f', {step.error}' if step.error else ''}")
                    if step.name == "publish-day" and step.status == "succeeded":
                        print((await app.find(step.job)).result)
            finally:
                worker.stop()
                await working
    print(f"{ended.name}: {ended.status}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "2013-01-01"))
