"""Changes of Python files, for `penstock worker --reload`."""

from __future__ import annotations

import threading
from pathlib import Path

from penstock.core.extras import needs


class SourceChanges:
    """Watches the Python files below a folder. Environments, caches and version control are left out.

    Args:
        folder: The folder.

    Raises:
        MissingExtra: The package watchfiles is not installed.
    """

    def __init__(self, folder: Path) -> None:
        with needs("reload", "--reload"):
            import watchfiles
        self._seen = threading.Event()

        def run() -> None:
            for _ in watchfiles.watch(folder, watch_filter=watchfiles.PythonFilter(), raise_interrupt=False):
                self._seen.set()

        threading.Thread(target=run, name="penstock-reload", daemon=True).start()

    def seen(self) -> bool:
        """Whether a file has changed since the last call."""
        seen = self._seen.is_set()
        self._seen.clear()
        return seen
