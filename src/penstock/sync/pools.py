"""Pools, for threads without an event loop."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from penstock.pools import Pool
from penstock.sync.loop import OnLoop


class SyncPools(OnLoop):
    """Standing jobs of pools. Their other jobs are enqueued with `enqueue`."""

    def start(
        self, pool: Pool[Any], key: str, data: Any = None, *, replace: bool = False, timeout: timedelta | None = None
    ) -> str:
        """Start the standing job of a key. See `penstock.pools.Pool.start`."""
        return self._call(pool.start(key, data, replace=replace, timeout=timeout))

    def stop(self, pool: Pool[Any], key: str) -> bool:
        """Stop the standing job of a key. See `penstock.pools.Pool.stop`."""
        return self._call(pool.stop(key))

    def notify(self, pool: Pool[Any], key: str, message: Any) -> None:
        """Send a message to the standing job of a key. See `penstock.pools.Pool.notify`."""
        self._call(pool.notify(key, message))

    def reconcile(self, pool: Pool[Any], wanted: Mapping[str, Any]) -> tuple[int, int, int]:
        """Make the standing jobs equal to a wanted set. See `penstock.pools.Pool.reconcile`."""
        return self._call(pool.reconcile(wanted))
