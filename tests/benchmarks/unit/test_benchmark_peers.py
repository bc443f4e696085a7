"""The scripts of the systems that are measured beside Penstock. What they measure is not tested: that they can be started is."""

import ast
import re
from pathlib import Path

import pytest

from benchmarks.peers_run import PEERS, PENSTOCK

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "peers"
SHARED = {"__init__", "protocol"}


@pytest.mark.parametrize("peer", [peer.name for peer in PEERS])
def test_a_peer_has_a_script_and_exact_pins(peer):
    compile((SCRIPTS / f"{peer}.py").read_text(), f"{peer}.py", "exec")
    pins = (SCRIPTS / f"{peer}.txt").read_text().split()
    assert pins
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+(\[[a-z,]+\])?==[0-9][0-9a-z.]*", pin)] == []


@pytest.mark.parametrize("peer", [peer.name for peer in PEERS])
def test_the_versions_that_a_peer_shows_are_pinned(peer):
    pinned = {re.split(r"[\[=]", pin)[0] for pin in (SCRIPTS / f"{peer}.txt").read_text().split()}
    shown = {
        name
        for node in ast.walk(ast.parse((SCRIPTS / f"{peer}.py").read_text()))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and "packages" in {getattr(target, "id", "") for target in getattr(node, "targets", [getattr(node, "target", None)])}
        for name in ast.literal_eval(node.value)
    }
    assert shown
    assert shown - pinned == set()


LOGS = {"streams_penstock", "streams_redis", "streams_nats"}
"""The logs of benchmarks/streams.py."""
FLOWS = {"flows_penstock", "flows_absurd", "flows_dbos"}
"""The systems of benchmarks/flows.py."""


def test_every_script_is_measured():
    scripts = {path.stem for path in SCRIPTS.glob("*.py")} - SHARED - {"streams_protocol", "flows_protocol"}
    assert scripts == {peer.name for peer in (PENSTOCK, *PEERS)} | LOGS | FLOWS
    pinned = {peer.name for peer in PEERS} | LOGS | FLOWS
    assert {path.stem for path in SCRIPTS.glob("*.txt")} == pinned - {"streams_penstock", "flows_penstock"}
