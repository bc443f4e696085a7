"""`penstock up` on an embedded server: it says where the database is, and the server lives as long as those who use Penstock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg

from tests.waiting import eventually


async def test_up_prints_a_url_and_a_connection_to_it_keeps_no_server_alive(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PG", "DATABASE_"))}
    up = subprocess.Popen(
        [sys.executable, "-u", "-m", "penstock", "up"],
        env={**kept, "PENSTOCK_DATA_DIR": str(tmp_path / "data"), "NO_COLOR": "1"},
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        url = next((word for line in up.stdout for word in line.split() if word.startswith("postgresql://")), None)
        assert url is not None, "it ended without printing a URL"
        assert any("running" in line for line in up.stdout), "it ended before it was running"
        with psycopg.connect(url, autocommit=True) as connection:
            found = connection.execute("select count(*) from penstock.jobs").fetchone()
            assert found is not None
            up.send_signal(signal.SIGTERM)
            assert up.wait(60) == 0
            await eventually(lambda: is_cut(connection), "the end of the server beside an open connection", timeout=60)
    finally:
        up.kill()
        up.communicate()


def is_cut(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    """Whether the server has ended the connection."""
    try:
        connection.execute("select 1")
    except psycopg.OperationalError:
        return True
    return False
