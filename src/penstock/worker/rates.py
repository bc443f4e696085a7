"""Writes what a process counts into the rates of its database, once a minute and when it stops."""

from __future__ import annotations

import asyncio
import random
import time

from penstock.core import tally as tallies
from penstock.core.logs import get_logger
from penstock.errors import PenstockError
from penstock.jobs import rates
from penstock.postgres import health
from penstock.postgres.database import Database

log = get_logger("penstock.maintenance")
_EVERY_S = 60.0


async def write_rates(database: Database) -> None:
    """Write what this process has counted for a database since the last call; nothing when nothing ended.

    When that fails, what was counted is dropped: it may be written already, and no attempt counts twice.
    """
    tally = tallies.of(database)
    counted = tally.take()
    if not counted:
        return
    before = time.time()
    try:
        theirs = await rates.note_rates(database, counted)
    except PenstockError as error:
        log.warning("rates_dropped", error=error)
    else:
        tally.clock_is_ahead(theirs - (before + time.time()) / 2)


async def keep_writing(database: Database) -> None:
    """Write every minute, until cancelled. Processes that start together do not write together."""
    try:
        tallies.of(database).clock_is_ahead(await health.clock_ahead_s(database))
    except PenstockError as error:
        log.warning("clock_unknown", error=error)
    await asyncio.sleep(random.uniform(0.1, 1.0) * _EVERY_S)
    while True:
        await write_rates(database)
        await asyncio.sleep(_EVERY_S)
