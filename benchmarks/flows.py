"""An order of three durable steps in Penstock, absurd and DBOS, all on PostgreSQL, in one run on one machine.

    .venv/bin/python -m benchmarks.flows                          # about five minutes on two quiet cores
    .venv/bin/python -m benchmarks.flows --share 0.1 --rounds 1 --systems penstock,absurd

One process starts the orders, another one works on them. The systems take turns, round after round, each on a fresh database of
one server that syncs before each commit is acknowledged; medians count. Each system is used in its fastest way with one worker
process: absurd, whose clients have one connection each, with eight of them; DBOS with 32 workflows at once. Results:
`benchmarks/results/flows.json`, and `flows.md` with the table for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import asyncpg
from rich.console import Console

from benchmarks import environments
from benchmarks.environments import ON_DISK, PeerFailed
from penstock.testing import TemporaryDatabases

SYSTEMS = {"penstock": "Penstock", "absurd": "absurd", "dbos": "DBOS"}
ORDERS = {"penstock": 5_000, "absurd": 2_000, "dbos": 1_000}
STEPS = 3
RESULTS = Path(__file__).parent / "results"
console = Console(width=160)


def measured(databases: TemporaryDatabases, system: str, orders: int) -> dict[str, Any]:
    """Start orders and work on them, in a fresh database. Raises `PeerFailed`."""
    peer = f"flows_{system}"
    with databases.database() as url:
        environments.run(peer, "prepare", 0, url)
        asyncio.run(_checkpoint(url))
        started = environments.run(peer, "start", orders, url)
        worked = environments.run(peer, "work", orders, url)
    if not worked["each_once"]:
        raise PeerFailed("not every step ran exactly once")
    return {
        "versions": worked["versions"],
        "started_per_s": orders / started["seconds"],
        "orders_per_s": orders / worked["seconds"],
        "steps_per_s": STEPS * orders / worked["seconds"],
    }


def run(systems: list[str], rounds: int, share: float) -> dict[str, dict[str, Any]]:
    """Measure the systems in turn; the medians of each."""
    rows: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    failures: dict[str, str] = {}
    with TemporaryDatabases(parent=ON_DISK) as databases:
        for number in range(rounds):
            for system in systems if number % 2 == 0 else reversed(systems):
                if system in failures:
                    continue
                try:
                    rows[system].append(measured(databases, system, max(30, int(ORDERS[system] * share))))
                    console.print(system, rows[system][-1])
                except PeerFailed as failure:
                    failures[system] = str(failure)[-2000:]
                    console.print(f"[bold]{SYSTEMS[system]} failed[/bold]", failure, markup=False)
    return {system: _median(rows[system]) if rows[system] else {"failure": failures.get(system, "")} for system in systems}


def write(results: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write `flows.json` and `flows.md`."""
    folder.mkdir(exist_ok=True)
    (folder / "flows.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = ["| system | orders started/s | orders/s | steps/s |", "|---|---:|---:|---:|"]
    for system, row in results.items():
        name = f"{SYSTEMS[system]} {next(iter(row.get('versions', {}).values()), '')}".strip()
        if "failure" in row:
            lines.append(f"| {name} | failed | | |")
        else:
            lines.append(f"| {name} | {row['started_per_s']:,.0f} | {row['orders_per_s']:,.0f} | {row['steps_per_s']:,.0f} |")
    (folder / "flows.md").write_text("\n".join(lines) + "\n")
    console.print("\n".join(lines))


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    fields = ("started_per_s", "orders_per_s", "steps_per_s")
    return {"versions": rows[-1]["versions"], **{name: statistics.median(row[name] for row in rows) for name in fields}}


async def _checkpoint(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("checkpoint")
    await connection.close()


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flows", description=__doc__)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="only these, by comma")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="part of the usual number of orders")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    systems = arguments.systems.split(",")
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    for system in systems:
        environments.python_of(f"flows_{system}")
    write(run(systems, arguments.rounds, arguments.share), arguments.results)


if __name__ == "__main__":
    main()
