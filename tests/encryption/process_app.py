"""An application whose handlers run in threads and in processes."""

from __future__ import annotations

from typing import Any

from penstock import Job, Penstock

KEY = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
app = Penstock(keys=[KEY])


@app.job("in-thread", encrypted=True, keep_result=True)
def in_thread(job: Job[dict[str, Any]]) -> str:
    return f"got {job.data['card']}"


@app.job("in-process", encrypted=True, keep_result=True, executor="process")
def in_process(job: Job[dict[str, Any]]) -> str:
    return f"got {job.data['card']}"
