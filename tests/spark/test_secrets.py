"""A driver whose writes and reads fail shows neither payloads nor the database's password, in no log of Python's or Spark's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import Penstock

CARD = "s3cret-in-the-payload"
PASSWORD = "s3cret-of-the-database"
DRIVER = f"""
import sys
from penstock.core import logs
from penstock.spark import session

logs.configure(output=2)
url, folder = sys.argv[1:]
away = "postgresql://user:{PASSWORD}@127.0.0.1:1/none"
spark = session(app_name="secrets", master="local[1]", config={{"spark.driver.memory": "600m", "spark.task.maxFailures": "1"}})
good = "to_json(named_struct('card', '{CARD}', 'n', id))"
tried = 0
for to, data in (
    (url, f"if(id < 5, {{good}}, '{{{{broken {CARD}')"),
    (url, f"concat({{good}}, '{CARD}')"),
):
    try:
        frame = spark.range(0, 8, 1, 2).selectExpr(f"{{data}} as data")
        frame.write.format("penstock").options(url=to, job="t").mode("append").save()
    except Exception:
        tried += 1
try:
    spark.read.format("penstock").options(url=away, table="archived_jobs").load().collect()
except Exception:
    tried += 1
print("failed", tried, flush=True)
spark.stop()
"""


async def _prepare(url: str) -> None:
    async with Penstock(url) as app:
        await app.job_type("t").declare()


@pytest.mark.soak
def test_a_driver_that_fails_shows_no_secret(url: str, tmp_path: Path) -> None:
    asyncio.run(_prepare(url))
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, str(script), url, str(tmp_path)],
        env={**os.environ, "PENSTOCK_LOG_LEVEL": "debug", "PENSTOCK_START_TIMEOUT": "2"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = done.stdout + done.stderr
    assert "failed 3" in done.stdout, said[-3000:]
    for secret in (CARD, PASSWORD):
        place = said.find(secret)
        assert place < 0, said[max(0, place - 600) : place + 200]
