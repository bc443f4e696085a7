"""A poller of the dashboard without a database, for tests of what it does with its readings."""

from __future__ import annotations

from typing import Any

from penstock.http.dashboard.poller import Poller


class Nowhere:
    """An application without a database, for readings that need none."""

    @property
    def settings(self) -> Nowhere:
        return self

    def model_copy(self, **_: Any) -> Nowhere:
        return self

    def beside(self, *_: Any) -> Nowhere:
        return self

    async def database(self) -> Nowhere:
        return self

    async def open(self) -> None:
        """Nothing."""


def poller_of_nowhere() -> Poller:
    """A poller whose readings are given no database."""
    nowhere: Any = Nowhere()
    return Poller(nowhere)
