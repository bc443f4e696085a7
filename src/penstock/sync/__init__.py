"""Penstock for threads without an event loop: Django, Flask, scripts.

Calls run on a loop in a background thread, one for each app. With `connection=` nothing leaves the calling thread.
A file for each shape of work; `SyncPenstock` has them all.
"""

from penstock.sync.jobs import SyncJobs
from penstock.sync.pools import SyncPools
from penstock.sync.streams import SyncConsumption, SyncStreams
from penstock.sync.topics import SyncTopics

__all__ = ["SyncConsumption", "SyncPenstock"]


class SyncPenstock(SyncJobs, SyncPools, SyncStreams, SyncTopics):
    """The blocking side of an app; get it from `Penstock.sync`. Safe to use from many threads.

    Args:
        app: The app.
        timeout: Longest time for one call.
    """
