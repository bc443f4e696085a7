"""How xdist shares the tests among its processes."""

from __future__ import annotations

from xdist.scheduler import LoadGroupScheduling

WITH_SERVERS = {"browser", "http"}
"""Folders in which most modules start a server for their tests."""


class ByServer(LoadGroupScheduling):
    """Gives all tests of a module that has a server to one process, so that the server starts once.

    It goes by the paths of the tests. xdist's own marker for groups has no effect with pytest 9.2, where the id of a test can no
    longer be set.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        _, folder, *rest = path.split("/")
        if folder in WITH_SERVERS and "unit" not in rest:
            return path
        return str(super()._split_scope(nodeid))
