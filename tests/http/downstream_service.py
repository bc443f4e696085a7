"""A downstream service for tests, as a process of its own: what it does with a job stands in the job's data.

python downstream_service.py PORT PENSTOCK_URL TOKEN HISTORY
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import aiohttp
from aiohttp import web

PORT, PENSTOCK, TOKEN, HISTORY = sys.argv[1:5]
tasks: set[asyncio.Task[None]] = set()
seen: dict[str, int] = {}
started: set[tuple[str, int]] = set()


def record(kind: str, id: str, name: str, attempts: int = 0, outcome: str = "", **more: Any) -> None:
    event = {"kind": kind, "id": id.removeprefix("job_"), "name": name, "at": time.monotonic(), "attempts": attempts}
    event |= {"worker": str(os.getpid()), "outcome": outcome, **more}
    file = os.open(HISTORY, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(event) + "\n").encode())
    os.close(file)


async def call_back(app: web.Application, name: str, id: str, attempt: int, status: str, **fields: Any) -> None:
    body = {"status": status, "attempt": attempt, **fields}
    while True:
        try:
            async with app["session"].post(f"{PENSTOCK}/v1/jobs/{name}/{id}", json=body) as response:
                if response.status < 500:
                    answer = await response.text()
                    record("callback", id, name, attempt, status)
                    record("answer", id, name, attempt, str(response.status) + answer)
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.05)


async def work(app: web.Application, name: str, id: str, body: dict[str, Any]) -> None:
    data, attempt = body["data"], body["attempts"]
    act = data.get("act", "succeed")
    await asyncio.sleep(data.get("sleep_s", 0))
    failed = act == "fail" or attempt > data.get("succeed_at", 99)
    status = "failed" if failed else "succeeded"
    record("ended", id, name, attempt, status)
    if act == "forget" and seen[id] <= data.get("times", float("inf")):
        return
    if act == "stale":
        # Numbers count down: these are of attempts before. (The next number may be the job's by the time it arrives.)
        await call_back(app, name, id, attempt + 1, "succeeded")
        await call_back(app, name, id, attempt + 1, "failed", retryable=False)
    await call_back(app, name, id, attempt, status)
    if act == "twice":
        await call_back(app, name, id, attempt, status)


async def take(request: web.Request) -> web.StreamResponse:
    name, id, body = request.match_info["name"], request.match_info["id"], await request.json()
    data = body["data"]
    act = data.get("act", "succeed")
    seen[id] = seen.get(id, 0) + 1
    record("request", id, name, body["attempts"], act, body=body, headers=dict(request.headers))
    if act == "503" and seen[id] <= data["times"]:
        return web.json_response({"title": "Busy", "id": "service_unavailable"}, status=503)
    if act == "500" and seen[id] <= data["times"]:
        return web.json_response({"title": "Broken", "id": "server_error"}, status=500)
    if act == "refuse":
        return web.json_response({"title": "No such shipment", "id": "invalid"}, status=400)
    # A request that comes twice, since the answer was lost, is one start: a service has to be idempotent.
    again = (id, body["attempts"]) in started
    if not again:
        started.add((id, body["attempts"]))
        record("started", id, name, body["attempts"])
    # A job that was forgotten is worked on when it comes again, under whatever number.
    if not again or act == "forget":
        if act == "first":
            await work(request.app, name, id, body)
            return web.Response(status=500, text="stumbled")
        task = asyncio.create_task(work(request.app, name, id, body))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if act == "drop":
        assert request.transport is not None
        request.transport.abort()
    if act == "late":
        await asyncio.sleep(data["answer_s"])
    return web.json_response({}, status=202) if act != "empty" else web.Response(status=200)


async def main() -> None:
    app = web.Application()
    app.router.add_post("/v1/jobs/{name}/{id}", take)
    app["session"] = aiohttp.ClientSession(headers={"Authorization": f"Bearer admin.{TOKEN}"})
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(PORT)).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
