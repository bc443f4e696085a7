"""`penstock worker --autoscale MIN:MAX`: the advice, read in a thread beside the supervisor, which asks for a number."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import typer

from penstock.app import Penstock
from penstock.core.logs import get_logger
from penstock.errors import PenstockError
from penstock.jobs.scaling import Autoscale, ScaleAdvice
from penstock.settings import Settings

log = get_logger("penstock.worker")


def parse_range(text: str) -> tuple[int, int]:
    """The fewest and the most workers of MIN:MAX. Raises `typer.BadParameter`."""
    match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= low <= high <= 256:
        raise typer.BadParameter(f"{text!r} is no range: write MIN:MAX, 1 to 256, such as 1:8", param_hint="--autoscale")
    return low, high


class Autoscaler:
    """Reads the scaling advice for an app at intervals, and returns how many worker processes there should be.

    Args:
        app: Makes the app whose workers are scaled; it is opened in a thread of its own.
        names: The job types and pools that they work on; none: all that the app handles.
        low: The fewest.
        high: The most.
        wait: How long a job should wait at most.
        settings: Intervals.
    """

    def __init__(
        self, app: Callable[[], Penstock], names: Sequence[str], low: int, high: int, wait: timedelta, settings: Settings
    ) -> None:
        self._app = app
        self._names = set(names)
        self._wait = wait
        self._interval_s = settings.autoscale_interval.total_seconds()
        self._scale = Autoscale(low, high, settings.autoscale_settle.total_seconds(), settings.autoscale_cooldown.total_seconds())
        self._advice: Sequence[ScaleAdvice] = ()
        threading.Thread(target=lambda: asyncio.run(self._read()), name="penstock-autoscale", daemon=True).start()

    def wanted(self, working: int) -> int:
        """How many worker processes there should be, when so many work now."""
        number = self._scale.decide(self._advice, working, time.monotonic())
        if number != working:
            advice = {one.name: one.advised for one in self._advice}
            log.info("autoscaled", workers=number, before=working, advised=advice)
        return number

    async def _read(self) -> None:
        app = self._app()
        names = self._names or {name for name, declared in app.types.items() if declared.works}
        async with app:
            while True:
                try:
                    self._advice = [one for one in await app.scale_advice(wait=self._wait) if one.name in names]
                except PenstockError as error:
                    # The load is not known: all stays as it is.
                    self._advice = ()
                    log.warning("autoscale_advice_failed", error=error)
                await asyncio.sleep(self._interval_s)
