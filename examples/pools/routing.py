"""Reverse request routing: clients hold WebSockets to one of several endpoints; a request for a client reaches the endpoint that
holds its connection, and the answer comes back.

    pip install "penstock[examples]"
    python -m examples.pools.routing

Each endpoint is a worker of the pool `requests` and says which clients are connected to it; the pool's rule sends the jobs of a
client there. A request for a client that is not connected waits until it is, or until it expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from penstock import Conflict, Penstock, PoolWorker
from penstock.groups.assignors import Candidate

app = Penstock()


def connected(client: str, workers: Sequence[Candidate]) -> int | None:
    """The endpoint that has the client; None: none has, so wait."""
    return next((place for place, worker in enumerate(workers) if client in worker.metadata["clients"]), None)


requests = app.pool("requests", payload=str, assign=connected, keep_result=True)


@asynccontextmanager
async def endpoint(id: str) -> AsyncIterator[int]:
    """Serve clients on a port, and forward to them the requests that come. Yields the port."""
    sockets: dict[str, ServerConnection] = {}
    answers: dict[str, asyncio.Queue[str]] = {}

    async with requests.worker(id, metadata={"clients": []}) as worker:

        async def serve_client(socket: ServerConnection) -> None:
            client = str(await socket.recv())
            sockets[client], answers[client] = socket, asyncio.Queue()
            await worker.set_metadata({"clients": sorted(sockets)})
            try:
                with suppress(ConnectionClosed):
                    async for message in socket:
                        answers[client].put_nowait(str(message))
            finally:
                del sockets[client]
                await worker.set_metadata({"clients": sorted(sockets)})

        async with serve(serve_client, "127.0.0.1", 0) as server:
            forwarding = asyncio.create_task(_forward(worker, sockets, answers))
            try:
                yield next(iter(server.sockets)).getsockname()[1]
            finally:
                forwarding.cancel()


async def _forward(worker: PoolWorker[str], sockets: dict[str, ServerConnection], answers: dict[str, asyncio.Queue[str]]) -> None:
    async for job in worker.jobs():
        client = str(job.key)
        try:
            await sockets[client].send(job.data)
        except (KeyError, ConnectionClosed):
            # It went a moment ago: the job goes back, and to wherever the client turns up.
            with suppress(Conflict):
                await job.release()
            continue
        with suppress(Conflict):
            await job.ack(f"{await answers[client].get()}, by {worker.id}")


async def client(name: str, port: int) -> None:
    """A client that answers what it is asked, until cancelled."""
    async with connect(f"ws://127.0.0.1:{port}") as socket:
        await socket.send(name)
        async for question in socket:
            await socket.send(f"{name} says: {str(question)[::-1]}")


async def ask(name: str, question: str) -> str:
    """Ask a client, wherever it is connected."""
    receipt = await requests.enqueue(name, question, expires_at=timedelta(seconds=30))
    return str((await app.wait(receipt.id)).result)


async def main() -> None:
    """Two endpoints, three clients; one client moves."""
    async with app:
        await requests.declare()
        async with endpoint("north") as north, endpoint("south") as south:
            ada = asyncio.create_task(client("ada", north))
            others = [asyncio.create_task(client(name, south)) for name in ("bob", "eve")]
            for answer in await asyncio.gather(*[ask(name, "hello") for name in ("ada", "bob", "eve")]):
                print(answer)
            ada.cancel()
            await asyncio.gather(ada, return_exceptions=True)
            asked = asyncio.create_task(ask("ada", "where are you"))
            ada = asyncio.create_task(client("ada", south))
            print(await asked)
            for task in (ada, *others):
                task.cancel()
            await asyncio.gather(ada, *others, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
