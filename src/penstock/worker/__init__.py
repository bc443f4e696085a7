"""The worker: claims jobs in batches, runs their handlers, settles them in batches, and maintains the queue.

A job goes fetcher -> executor -> completer, never back. `worker.py` puts the parts together; each has one loop with a name.
"""

from penstock.worker.work import Work
from penstock.worker.worker import Worker, stop_on

__all__ = ["Work", "Worker", "stop_on"]
