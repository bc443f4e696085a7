"""What a worker does not work on for want of a key: it says so in its log and in its row, instead of failing jobs or events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.core.encryption import Keyring
from penstock.core.logs import get_logger
from penstock.jobs import worker_queries
from penstock.jobs.records import JobTypeRecord
from penstock.postgres.database import Database
from penstock.streams.consumer.consumer import Consumer

log = get_logger("penstock.worker")


class LockedWork:
    """The encrypted types, pools and streams of one worker that its keys do not open.

    Args:
        database: Database of the worker's row.
        keyring: Keys of the worker.
        worker: Id of the worker's row.
        consumers: Consumers of the worker.
    """

    def __init__(
        self, database: Database, keyring: Keyring, worker: Callable[[], str], consumers: Iterable[Consumer[Any]] = ()
    ) -> None:
        self._database = database
        self._keyring = keyring
        self._worker = worker
        self._consumers = consumers
        self._noted: tuple[str, dict[str, str | None]] = ("", {})

    async def look(self, records: Iterable[JobTypeRecord]) -> None:
        """Look for job types and streams that the keys do not open, and write what has changed since the last call."""
        found: dict[str, str | None] = {}
        for consumer in self._consumers:
            found |= consumer.missing
        if sealed := [record for record in records if record.encrypted_at is not None]:
            found |= {record.name: None for record in sealed if record.encrypted and not self._keyring}
            found |= {
                name: key
                for name, key in (
                    await worker_queries.missing_keys(self._database, [record.name for record in sealed], self._keyring.ids)
                ).items()
                if name not in found
            }
        worker = self._worker()
        if self._noted == (worker, found) or not (found or self._keyring or self._noted[1]):
            return
        await worker_queries.note_keys(self._database, worker, self._keyring.ids, found)
        for name, key in found.items():
            if self._noted[1].get(name, "") != key:
                log.warning(
                    "no_key", worker=worker, work_on=name, key=key,
                    hint="Give the worker the keys that the producers have: Penstock(keys=[...]), or PENSTOCK_KEYS.",
                )  # fmt: skip
        for name in self._noted[1].keys() - found.keys():
            log.info("key_no_longer_missing", worker=worker, work_on=name)
        self._noted = (worker, found)
