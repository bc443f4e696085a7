"""What the readers of streaming queries share: the process of a query stays with it, so a reader keeps a connection there."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from penstock.spark.blocking import Blocking


class FollowingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming reader with a connection.

    Args:
        url: The database.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._blocking: Blocking | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tasks get a copy to read with; the connection stays here.
        return {**self.__dict__, "_blocking": None}

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: Spark does not commit the last batch of a query, so nothing may rest on it."""

    def stop(self) -> None:
        """Close the connection. Spark does not always call this; a process that ends closes it too."""
        if self._blocking is not None:
            self._blocking.close()
            self._blocking = None

    @property
    def _here(self) -> Blocking:
        if self._blocking is None:
            self._blocking = Blocking(self._url)
        return self._blocking
