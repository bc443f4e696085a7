"""Where a query begins that takes over from another one which writes to Penstock. Needs no JVM.

The last batch that is recorded for a writer has been written, and nothing behind it. So a query with a new checkpoint goes on
exactly if it begins at the positions up to which that batch had read, and the query before it writes no more. A query that writes
to several targets, one after the other in `foreachBatch`, may have ended between two of them: then no beginning is right for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import Conflict, InvalidInput, NotFound
from penstock.postgres.database import Database
from penstock.spark import staging
from penstock.spark.checkpoints import Checkpoint
from penstock.spark.staging import Writer
from penstock.spark.streams.offsets import LAG, SINCE


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A writer that is ready to be taken over.

    Attributes:
        writer: Name of the writer.
        query: Id of the query that wrote under it, which is refused from now on.
        batch: Number of the last batch that was written to all targets.
        starting: Where the new query begins to read each source of the old one, in their order, as the option
            `startingOffsets` takes it; None: the old one has read nothing of it, so at its beginning.
        again: Targets to which later batches were written already, which the new query writes again.
    """

    writer: str
    query: str
    batch: int
    starting: list[Any]
    again: list[str]


async def take_over(database: Database, writer: str, *, checkpoint: str | None = None, repeat: bool = False) -> TakeOver:
    """Hand the name of a writer over to a new query, and say where that has to begin. May be repeated until it has begun.

    Args:
        database: Database to which the queries write, as the role under which they write.
        writer: Name of the writer: the option `writer`, or `query ID` of a query without one.
        checkpoint: Checkpoint of the old query, folder or URI, from which positions are taken that are not recorded: those of
            `foreachBatch` are, if the writes have the option `checkpointLocation`.
        repeat: Begin at the earliest batch when the targets stand at different ones.

    Raises:
        NotFound: No query of this role writes under the name, or the checkpoint is not there or no longer has the batch.
        Conflict: The targets stand at different batches, or the query still writes.
        InvalidInput: The positions are not recorded and no checkpoint is given, or it is that of another query.
    """
    noted = await staging.known_writers(database, writer)
    if not noted:
        raise NotFound(
            f"no query of this role writes under the name {writer}",
            hint="penstock streams writers list shows the names. A name belongs to the database role that writes under it.",
        )
    # Of those that a new query has begun to take over, the ones that are left.
    old = next((one for one in noted if one.handed_over), noted[0])
    query = old.query
    if query is None:
        raise Conflict(
            f"{writer} is the name of batch writes to {old.target}, and of no query",
            hint="Batch writes have nothing to hand over: give the query another name.",
        )
    if other := next((one for one in noted if one.query != query), None):
        raise Conflict(
            f"{writer} has been taken over by the query {other.query} for {other.target}, and not yet for {old.target}",
            hint="Let the query that has begun write a batch to each of its targets, or forget the name: penstock streams writers"
            " forget.",
        )
    last = _last(noted)
    batch = min(last.values())
    ahead = sorted(target for target, epoch in last.items() if epoch > batch)
    if ahead and not repeat:
        behind = sorted(set(last) - set(ahead))
        raise Conflict(
            f"{writer} stands at batch {batch} of {', '.join(behind)}, and at batch {last[ahead[0]]} of {', '.join(ahead)}",
            hint="The query ended between its writes. Start it once more with its checkpoint, for the batch that is missing:"
            f" what is recorded is not written again. Or begin after batch {batch} with --repeat: the batches behind it are"
            f" written again to {', '.join(ahead)}.",
        )
    starting = await _positions(noted, batch, query, checkpoint)
    await staging.hand_over(database, writer, {one.target: one.epoch for one in noted})
    return TakeOver(writer, query, batch, [_as_option(one) for one in starting], ahead)


def _last(noted: Sequence[Writer]) -> Mapping[str, int]:
    """The last batch of each write: one whose rows name their targets stands where it has a record of its own."""
    return {one.target: one.epoch for one in noted if not one.by_column or one.target in ("jobs", "streams")}


async def _positions(noted: Sequence[Writer], batch: int, query: str, place: str | None) -> list[Any]:
    if recorded := next((one.offsets for one in noted if one.epoch == batch and one.offsets is not None), None):
        return recorded
    if place is None:
        raise InvalidInput(
            f"it is not recorded up to where batch {batch} of the query {query} has read",
            hint="Give the checkpoint of the query: --checkpoint FOLDER. In foreachBatch it is recorded when the writes have the"
            " option checkpointLocation, and the driver can read it as a local folder.",
        )
    checkpoint = await asyncio.to_thread(Checkpoint.of, place)
    if checkpoint.query != query:
        raise InvalidInput(
            f"{checkpoint.uri} is the checkpoint of the query {checkpoint.query}, and the name belongs to the query {query}",
            hint="Give the checkpoint that the option checkpointLocation of that query names.",
        )
    found = await asyncio.to_thread(checkpoint.sources, batch)
    if found is None:
        raise NotFound(
            f"the checkpoint {checkpoint.uri} has no batch {batch}",
            hint="Spark keeps the last hundred. In foreachBatch the option epoch has to be the number of the batch.",
        )
    return found


def _as_option(position: Any) -> Any:
    if isinstance(position, dict):
        return {name: value for name, value in position.items() if name not in (SINCE, LAG)}
    return position
