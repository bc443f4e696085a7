"""SAQ on PostgreSQL, otherwise as on Redis."""

from __future__ import annotations

import orjson
from saq import Queue

from benchmarks.peers.protocol import main
from benchmarks.peers.saq import CONCURRENCY, SaqPeer


class SaqPostgresPeer(SaqPeer):
    packages = ("saq", "psycopg", "uvloop")

    def queue(self, url: str) -> Queue:
        return Queue.from_url(url, dump=orjson.dumps, load=orjson.loads, min_size=4, max_size=CONCURRENCY + 4)


if __name__ == "__main__":
    main(SaqPostgresPeer())
