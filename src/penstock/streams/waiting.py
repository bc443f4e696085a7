"""When a loop that reads a stream looks for events again."""

from __future__ import annotations

from penstock.core.polling import Polling

# An announcement counts for 30 s. A commit during the announcement may not cause a notification, so the first looks come soon.
_ANNOUNCE_EVERY_S = 15.0
_FIRST_PAUSES_S = (0.005, 0.05)


def polling_for_events(poll_s: float) -> Polling:
    """The polling of one reader, which announces itself with `streams.queries.wait_for_events`."""
    return Polling(poll_s, first_pauses_s=_FIRST_PAUSES_S, announce_every_s=_ANNOUNCE_EVERY_S)
