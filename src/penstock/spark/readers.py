"""What the readers of streaming queries share. Each query has a Python process, in which its reader keeps a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from penstock.spark.blocking import Blocking

F = TypeVar("F")


class FollowingReader(DataSourceStreamReader, SupportsTriggerAvailableNow, Generic[F]):
    """A streaming reader with a connection and a follower, which finds the ends of batches and waits over that connection.

    Args:
        url: URL of the database.
        follower: Makes the follower. Spark pickles the reader, so this is a class or a function that can be imported by its name.
    """

    def __init__(self, url: str, follower: Callable[[Blocking], F]) -> None:
        self._url = url
        self._make_follower = follower
        self._opened: tuple[Blocking, F] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A task gets a copy to read with; the connection and the follower stay in the process of the query.
        return {**self.__dict__, "_opened": None}

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing. Spark does not commit the last batch of a query, so no state can depend on this call."""

    def stop(self) -> None:
        """Close the connection. Spark does not always call this; the end of the process closes the connection too."""
        if self._opened is not None:
            self._database.close()
            self._opened = None

    @property
    def _database(self) -> Blocking:
        return self._open()[0]

    @property
    def _follower(self) -> F:
        return self._open()[1]

    def _open(self) -> tuple[Blocking, F]:
        if self._opened is None:
            database = Blocking(self._url)
            self._opened = database, self._make_follower(database)
        return self._opened
