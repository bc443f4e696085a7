"""The worker: claims jobs in batches, runs their handlers, settles them in batches, and cares for the queue meanwhile.

A job goes claimer -> runner -> settler, never back. `worker.py` puts the parts together; each has one loop with a name.
"""

from penstock.worker.worker import Worker

__all__ = ["Worker"]
