"""Runs the measurements one after the other on one embedded PostgreSQL, prints them as ratios, and writes those beside other
systems to `benchmarks/results`.

    python -m benchmarks [--jobs 100000] [--only MEASUREMENT] [--hold 20] [--peers pgqueuer,saq] [--rounds 1]
    python -m benchmarks compare --before PATH       this checkout beside another one; see benchmarks/compare.py
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import compare
from benchmarks.backlog import Backlog
from benchmarks.environments import ON_DISK
from benchmarks.measurements import Bench
from benchmarks.peers_run import PEERS, PENSTOCK, PeersRun
from benchmarks.report import print_peers, print_rows
from benchmarks.workflows import Workflows
from penstock.testing import TemporaryDatabases


def main() -> None:
    """Measure what is asked for."""
    if sys.argv[1:2] == ["compare"]:
        compare.main(sys.argv[2:])
        return
    arguments = _arguments()
    with TemporaryDatabases(parent=ON_DISK) as databases:
        if arguments.only != "peers":
            bench = Bench(databases, arguments.jobs)
            backlog = Backlog(bench, 10 * arguments.jobs, arguments.hold)
            workflows = Workflows(bench)
            of_workflows = (workflows.group, workflows.then, workflows.graph, workflows.waiting)
            measures = (
                bench.enqueue, bench.drain, bench.latency, backlog.deferred, backlog.ready, backlog.held, *of_workflows,
            )  # fmt: skip
            for measure in measures:
                if arguments.only in (None, measure.__name__) or (arguments.only == "workflows" and measure in of_workflows):
                    bench.run(measure)
            print_rows(bench.rows)
        if arguments.only in (None, "peers"):
            peers = PeersRun(databases, arguments.peers, share=arguments.jobs / PENSTOCK.jobs)
            print_peers(peers.run(arguments.rounds))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--jobs", type=int, default=PENSTOCK.jobs, help="jobs of a measurement (100000); slow peers get a part of them"
    )
    parser.add_argument(
        "--only",
        choices=[
            "enqueue",
            "drain",
            "latency",
            "deferred",
            "ready",
            "held",
            "workflows",
            "group",
            "then",
            "graph",
            "waiting",
            "peers",
        ],
        help="only this one; workflows: group, then, graph and waiting",
    )
    parser.add_argument("--hold", type=float, default=20, help="seconds for which `held` holds its transaction open (20)")
    parser.add_argument(
        "--peers", type=_peers, default=(), help="only these, by comma: " + ", ".join(peer.name for peer in PEERS)
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often the peers' throughput is measured; medians count (1)")
    return parser.parse_args()


def _peers(given: str) -> tuple[str, ...]:
    names = tuple(given.split(","))
    known = {peer.name for peer in PEERS}
    if unknown := set(names) - known:
        raise argparse.ArgumentTypeError(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return names


if __name__ == "__main__":
    main()
