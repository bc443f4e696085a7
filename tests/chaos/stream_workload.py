"""The app of the chaos test of streams. One group records events, the other writes them in the transaction of its commit."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path

from penstock import Batch, Penstock
from tests.chaos import held

app = Penstock()
stream = app.stream("chaos", str, partitions=6)
SABOTAGE = os.environ.get("CHAOS_SABOTAGE", "")
HELD = os.environ.get("CHAOS_HELD", "")
SLOW = Path(os.environ["CHAOS_SLOW"]) / str(os.getpid())
IN_HAND = SLOW.with_suffix(".in-hand")
LONGEST_S = 40.0
later: set[asyncio.Task[None]] = set()


def record(batch: Batch[str], begun: float) -> None:
    """Append the handled events, in one write."""
    now = time.monotonic()
    lines = "".join(
        json.dumps(
            {
                "group": batch.group, "partition": event.partition, "offset": event.offset, "key": event.key, "value": event.data,
                "begun": begun, "at": now + place * 1e-9, "worker": str(os.getpid()),
            }
        ) + "\n"
        for place, event in enumerate(batch)
    )  # fmt: skip
    file = os.open(os.environ["CHAOS_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, lines.encode())
    finally:
        os.close(file)


async def work(batch: Batch[str]) -> None:
    begun = time.monotonic()
    await asyncio.sleep(0.002 * len(batch))
    if os.environ.get("CHAOS_LONG") and random.random() < 0.03:
        # Longer than the silence after which other members take over.
        await asyncio.sleep(6)
    # A batch that is running while this process is cut off lasts until other members own its partitions.
    while SLOW.exists() and time.monotonic() < begun + LONGEST_S:
        IN_HAND.touch()
        await asyncio.sleep(0.02)
    record(batch, begun)


async def work_late(batch: Batch[str]) -> None:
    """Handle a batch so long after its commit that no difference between clocks explains it."""
    await asyncio.sleep(1.0)
    await work(batch)


@stream.consumer(group="plain", max_batch_size=20)
async def plain(batch: Batch[str]) -> None:
    """Handle a batch, then let it be committed. Sabotaged: commit it first."""
    if SABOTAGE == "commit_before_handling":
        task = asyncio.create_task(work_late(batch))
        later.add(task)
        task.add_done_callback(later.discard)
    else:
        await work(batch)


@stream.consumer(group="exact", max_batch_size=50)
async def exact(batch: Batch[str]) -> None:
    """Write and commit in one transaction, also after a request to stop: the database has to refuse a late commit."""
    await asyncio.shield(keep_and_write(batch) if HELD else write(batch))


async def keep_and_write(batch: Batch[str]) -> None:
    """Sometimes hold the batch until the process has been frozen for so long that another member owns the partition."""
    own = held.Held(batch.partition, batch.fence.epoch, str(os.getpid()))
    older = held.older_than(Path(HELD), own)
    if not older and random.random() > 0.02:
        await write(batch)
        return
    with held.noted(Path(HELD), own):
        await asyncio.to_thread(held.hold, Path(HELD), own, older)
        await write(batch)


async def write(batch: Batch[str]) -> None:
    connection = await (await app.database()).connect()
    try:
        async with connection.transaction():
            await connection.executemany(
                "insert into public.chaos_written (partition, event_offset, value, epoch) values ($1, $2, $3, $4)",
                [(event.partition, event.offset, event.data, batch.fence.epoch) for event in batch],
            )
            if SABOTAGE != "two_transactions":
                # Suspects among events are tried one by one, and there are hundreds.
                await asyncio.sleep(min(0.1, 0.01 * len(batch)))
                await batch.commit(connection)
        if SABOTAGE == "two_transactions":
            await asyncio.sleep(0.1)
            async with connection.transaction():
                await batch.commit(connection)
    finally:
        await connection.close()


if SABOTAGE not in ("", "commit_before_handling", "two_transactions"):
    from tests.chaos import broken_worker

    broken_worker.sabotage(SABOTAGE)
