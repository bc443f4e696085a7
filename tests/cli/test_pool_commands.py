"""Every command about pools, over the database and over a server: the same table, the same answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.cli.pools import HELP
from penstock.testing import TemporaryDatabases
from tests.command_line import penstock
from tests.http.http_server import TOKEN, Served, serving

SEEN = {
    "create": lambda found: (found["name"], found["slots"]),
    "resize": lambda found: (found["name"], found["slots"]),
    "list": lambda found: [(one["name"], one["slots"], one["standing"]) for one in found],
    "show": lambda found: [len(one["slots"]) for one in found],
    "standing": lambda found: [(one["key"], one["data"], one["messages"]) for one in found],
    "keys": lambda found: [one["key"] for one in found],
    "pause-key": lambda found: found["key"],
    "resume-key": lambda found: found["key"],
    "key": lambda found: (found["key"], found["weight"], found["standing"]),
}
# What is called, its exit code, and what of its answer is the same through database and server.
STEPS: list[tuple[list[str], int, Any]] = [
    (["create", "shop", "--slots", "4"], 0, ("shop", 4)),
    (["create", "shop", "--slots", "9"], 0, ("shop", 4)),
    (["create", "plain", "--slots", "4"], 1, "plain job type"),
    (["create", "plain", "--slots", "4", "--convert"], 0, ("plain", 4)),
    (["create", "plain", "--slots", "4", "--convert"], 1, "pool"),
    (["resize", "shop", "8"], 0, ("shop", 8)),
    (["resize", "shop", "2"], 1, "slots"),
    (["weight", "shop", "a/b", "3"], 0, {"weights": {"a/b": 3}}),
    (["start", "shop", "a/b", '{"n": 1}'], 0, {"key": "a/b", "outcome": "starting"}),
    (["start", "shop", "a/b", '{"n": 1}'], 0, {"key": "a/b", "outcome": "unchanged"}),
    (["start", "shop", "a/b", '{"n": 2}'], 1, "payload"),
    (["start", "shop", "a/b", '{"n": 2}', "--replace"], 0, {"key": "a/b", "outcome": "replaced"}),
    (["notify", "shop", "a/b", '"now"'], 0, {"key": "a/b", "outcome": "notified"}),
    (["standing", "shop"], 0, [("a/b", {"n": 2}, 1)]),
    (["key", "shop", "a/b"], 0, ("a/b", 3, True)),
    (["keys", "shop"], 0, []),
    (["jobs", "shop"], 0, []),
    (["pause-key", "shop", "a/b"], 0, "a/b"),
    (["keys", "shop", "--paused"], 0, ["a/b"]),
    (["resume-key", "shop", "a/b"], 0, "a/b"),
    (["show", "shop"], 0, [8]),
    ([], 0, [("plain", 4, 0), ("shop", 8, 1)]),
    (["list"], 0, [("plain", 4, 0), ("shop", 8, 1)]),
    (["stop", "shop", "a/b"], 0, {"key": "a/b", "outcome": "stopped"}),
    (["stop", "shop", "a/b"], 1, "no standing job"),
    (["drain", "shop", "nobody"], 1, ""),
    (["undrain", "shop", "nobody"], 1, ""),
    (["show", "none"], 1, "none"),
    (["drop", "shop", "--yes"], 0, {"name": "shop", "dropped": True}),
    (["drop", "shop", "--yes"], 1, "no such pool"),
    (["list"], 0, [("plain", 4, 0)]),
]


@pytest.fixture(scope="module")
def served(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url, serving(url) as served:
        yield served


@pytest.mark.parametrize("through", ["database", "server"])
def test_every_command_works_through_database_and_server(url: str, served: Served, through: str) -> None:
    before, token = [], {}
    if through == "server":
        url, token = "postgresql://127.0.0.1:1/none", {"PENSTOCK_SERVER_TOKEN": f"admin.{TOKEN}"}
        before = ["--server", served.base_url]
    made = penstock(url, *before, "types", "create", "plain", **token)
    assert made.returncode == 0, made.stderr
    for arguments, code, expected in STEPS:
        done = penstock(url, *before, "pools", *arguments, "--json", **token)
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        if code:
            assert expected in done.stderr and "Traceback" not in done.stderr, (arguments, done.stderr)
        else:
            found = json.loads(done.stdout)
            assert SEEN.get(arguments[0] if arguments else "list", lambda same: same)(found) == expected, arguments


def test_every_command_is_in_the_table() -> None:
    commands = set(HELP.partition(": ")[2].partition(".")[0].split(", "))
    assert {arguments[0] for arguments, _, _ in STEPS if arguments} == commands
