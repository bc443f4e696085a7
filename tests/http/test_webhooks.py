"""The one call of the downstream worker, against a real service in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web
from pydantic import SecretStr

from penstock import InvalidInput
from penstock.integrations.rickover.service import DownstreamSettings, Refused, Service
from penstock.jobs.handler import Job


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


@pytest.mark.parametrize("again", [True, False])
async def test_an_attempt_is_on_the_wire_once_when_the_connection_breaks(again: bool) -> None:
    """The service reads requests to their ends: it answers the first, and closes the connection in the place of other answers."""
    requests: list[tuple[int, bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = len(requests)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split()[0])
                requests.append((connection, await reader.readexactly(length)))
                if len(requests) > 1:
                    break
                writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        service = Service(DownstreamSettings(url=f"http://127.0.0.1:{port}"))
        await service.open()
        try:
            assert await service.post(job(), again=again)
            lost = job()
            assert not await service.post(lost, again=again)  # it may have it
            assert [str(lost.id).encode() in body for _, body in requests] == [False, True]
            # The second one went over a connection that was kept, where that is allowed.
            assert (requests[0][0] == requests[1][0]) is again
        finally:
            await service.close()


@pytest.mark.parametrize(
    "url", ["", "jobs.example.com", "ftp://x", "http://", "http://x:port", "http://x/?a=b", "http://u:s3cret@/"]
)
def test_a_bad_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Service(DownstreamSettings(url=url))
    assert "s3cret" not in str(refused.value)
