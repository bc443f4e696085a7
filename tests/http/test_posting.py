"""The one call of the downstream worker, against a real service in the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web
from pydantic import SecretStr

from penstock import InvalidInput
from penstock.handler import Job
from penstock.posting import DownstreamSettings, Refused, Service


@asynccontextmanager
async def service_at(handler: Any, **settings: Any) -> AsyncIterator[Service]:
    """A service whose every route is `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    service = Service(
        DownstreamSettings(url=f"http://someone:secret@127.0.0.1:{port}/base/", password=SecretStr("x"), **settings)
    )
    await service.open()
    try:
        yield service
    finally:
        await service.close()
        await runner.cleanup()


def job() -> Job[str]:
    return Job(uuid4(), "echo", None, 1, 3, '{"n": 1}', datetime.now(UTC))


async def test_the_path_and_the_user_are_those_of_the_protocol() -> None:
    seen: list[tuple[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.raw_path, request.headers["Authorization"]))
        return web.Response(status=202)

    async with service_at(handler) as service:
        one = job()
        assert await service.post(one, again=True)
    assert seen == [(f"/base/v1/jobs/echo/job_{one.id}", "Basic am9iczp4")]  # jobs:x


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_without_end_is_not_read_to_its_end(status: int) -> None:
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        while sent < 500_000_000:
            await response.write(b"x" * 100_000)
            sent += 100_000
        return response

    async with service_at(handler) as service:
        if status == 200:
            assert await service.post(job(), again=True)
        else:
            with pytest.raises(Refused):
                await service.post(job(), again=True)
    assert sent < 100_000_000


async def test_what_may_be_sent_once_takes_a_fresh_connection() -> None:
    peers: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        return web.Response(status=202)

    async with service_at(handler) as service:
        for again in (True, True, False, False):
            assert await service.post(job(), again=again)
    assert peers[0] == peers[1]
    assert len(set(peers)) == 3


@pytest.mark.parametrize(
    "url", ["", "jobs.example.com", "ftp://x", "http://", "http://x:port", "http://x/?a=b", "http://u:s3cret@/"]
)
def test_a_bad_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Service(DownstreamSettings(url=url))
    assert "s3cret" not in str(refused.value)
