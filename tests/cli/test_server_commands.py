"""Every command, with `--server`: it works through a server, or says that it needs the database itself.

The cases are asked for by the list of commands itself, so that a new one cannot be forgotten here.
"""

from __future__ import annotations

import ast
import asyncio
import shlex
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from penstock import Batch, Penstock
from penstock.cli import app
from penstock.cli.lazy import LazyCommand
from penstock.errors import InvalidInput, PenstockError
from penstock.jobs import worker_queries
from penstock.testing import TemporaryDatabases
from penstock.worker import fleets
from tests.http.http_server import TOKEN, Served, serving
from tests.waiting import eventually
from tests.workers import Workers

TESTS = Path(__file__).parents[1]
# What works through a server: in this order, arguments and a part of what is printed; "!" begins a part of the error.
STEPS: list[tuple[str, str, str]] = [
    ("types create", "mail", "created: mail"),
    ("types change", "mail -s max_attempts=3 -s visibility_timeout=90s", "changed: mail"),
    ("types list", "", "mail"),
    ("types", "", "mail"),
    ("leaders", "", "no tasks of the leader yet"),
    ("workers", "", "web-3"),
    ("workers", "--json", '"silent_s"'),
    ("workers list", "", "web-3"),
    ("doctor", "", "the schema fits Penstock"),
    ("doctor", "--json", '"check"'),
    ("workers drain", "w-of-none", "!is of no fleet"),
    ("workers drain", "w-of-night", "draining: w-of-night of the fleet night"),
    ("workers drain", "nobody", "!no such worker"),
    ("fleet status", "", "night"),
    ("fleet drain", "night", "draining: night"),
    ("fleet drain", "nothing", "!no such fleet"),
    ("types show", "mail", "no worker has said anything"),
    ("types show", "mail", "base 2 s, factor 2.0, cap 3600 s, jitter 0.1"),
    ("types show", "nothing", "!no such job type or handler"),
    ("pause", "mail", "paused: mail"),
    ("resume", "mail", "resumed: mail"),
    ("stats", "", "mail"),
    ("enqueue", "mail 1 --id 01890000-0000-7000-8000-000000000001", "queued"),
    ("top", "--once", "last hour"),
    ("top types", "", "mail"),
    ("top types", "--order sideways", "!order must be ready, oldest or busy"),
    ("top keys", "--type mail", "no keys with jobs"),
    ("jobs list", "--type mail", "queued"),
    ("jobs show", "01890000-0000-7000-8000-000000000001", "mail"),
    ("jobs signal", "01890000-0000-7000-8000-000000000001 approved '[1]'", "signalled approved"),
    ("jobs signal", "01890000-0000-7000-8000-000000000001 approved", "has the signal approved already"),
    ("jobs show", "01890000-0000-7000-8000-000000000001", "approved: the job does not wait for it yet, 3 bytes"),
    ("jobs steps", "01890000-0000-7000-8000-000000000001 --results", "[1]"),
    ("jobs steps", "01890000-0000-7000-8000-00000000dead", "!not found"),
    ("jobs set-priority", "01890000-0000-7000-8000-000000000001 --priority -10", "priority -10"),
    ("jobs set-priority", "01890000-0000-7000-8000-000000000001 --priority -10", "left as it is"),
    ("jobs set-priority", "--all-matching --type mail --priority 5 --dry-run", "set-priority would apply to 1 jobs"),
    ("jobs run-now", "01890000-0000-7000-8000-000000000001", "left as it is"),
    ("jobs run-now", "--all-matching --type mail --dry-run", "run-now would apply to 0 jobs"),
    ("jobs run-now", "--all-matching --type mail", "running"),
    ("jobs cancel", "01890000-0000-7000-8000-000000000001", "cancelled"),
    ("jobs signal", "01890000-0000-7000-8000-000000000001 again", "!has ended: cancelled"),
    ("jobs replay", "01890000-0000-7000-8000-000000000001", "replayed as"),
    ("jobs cancel", "--all-matching --type mail --dry-run", "would apply to"),
    ("jobs replay", "--all-matching --type mail --status cancelled", "running"),
    ("jobs purge", "--type mail --dry-run", "purge would apply to"),
    ("operations", "", "replay"),
    ("operations list", "", "status cancelled"),
    ("operations show", "01890000-0000-7000-8000-00000000dead", "!not found"),
    ("operations cancel", "01890000-0000-7000-8000-00000000dead", "!not found"),
    ("enqueue", "mail --group import", "!no such job group"),
    ("jobs list", "--workflow import", "!no such job group"),
    ("jobs cancel", "--all-matching --workflow 01890000-0000-7000-8000-00000000dead", "!no such job group"),
    ("workflows", "", "no job groups yet"),
    ("workflows list", "--open", "no job groups yet"),
    ("workflows show", "import", "!no such job group"),
    ("workflows cancel", "import", "!no such job group"),
    ("workflows runs", "nightly --open", "no runs yet"),
    ("workflows retry", "nightly --from publish", "!no such run"),
    ("erase", "--key acme-of-none --dry-run", "finished jobs"),
    ("erase", "--field customer.id --key acme", "!has no value"),
    ("erase", "", "!either a key, or a field"),
    ("erase", "--field customer.id=acme-of-none --skip-unseen", "erase"),
    ("pools create", "shop --slots 4", "created: shop"),
    ("pools", "", "shop"),
    ("pools list", "", "shop"),
    ("pools show", "shop", "0-3"),
    ("pools drain", "shop nobody", "!not found"),
    ("pools undrain", "shop nobody", "!not found"),
    ("pools resize", "shop 8", "shop has 8 slots"),
    ("pools weight", "shop acme 3", "acme gets 3 jobs"),
    ("pools key", "shop acme --json", '"weight": 3'),
    ("pools keys", "shop", "no key is quarantined"),
    ("pools jobs", "shop", "no jobs"),
    ("pools pause-key", "shop acme", "paused: acme"),
    ("pools keys", "shop --paused", "acme"),
    ("pools resume-key", "shop acme", "resumed: acme"),
    ("pools resume-key", "shop acme", "was not paused: acme"),
    ("pools keys", "shop --paused", "no key is paused"),
    ("pools start", "shop acme", "starting: acme"),
    ("pools standing", "shop", "acme"),
    ("pools notify", "shop acme 1", "notified: acme"),
    ("pools stop", "shop acme", "stopped: acme"),
    ("scale advise", "", "shop"),
    ("topics create", "news", "created: news"),
    ("topics", "", "news"),
    ("topics list", "", "news"),
    ("topics subscribe", "news bob", "subscribed: bob"),
    ("topics subscribers", "news", "bob"),
    ("topics publish", "news 1", "to 1 subscribers"),
    ("topics read", "news", "1"),
    ("topics unsubscribe", "news bob", "unsubscribed: bob"),
    ("topics unsubscribe", "news bob", "was not subscribed: bob"),
    ("topics publish", "nwes 1", "!nwes"),
    ("streams create", 'orders --partitions 2 -s "keep_age=7 days"', "created: orders, 2 partitions"),
    ("streams change", "orders -s keep_age=3d", "changed: orders"),
    ("streams list", "", "259200 s"),
    ("streams append", "orders 1 --key acme", "offset 0"),
    ("streams tail", "orders --from earliest -n 1", "acme"),
    ("streams groups", "orders", "billing"),
    ("streams lag", "orders billing", "billing"),
    ("streams replay-dead", "spoiled", "replayed: 1"),
    ("streams replay-dead", "spoiled", "replayed: 0"),
    ("streams replay-dead", "spoiled -p 0 --offset 0", "replayed: 1"),
    ("streams reset", "orders billing --to latest", "next"),
    ("streams reset", "orders billing --to earliest -p 1", "1"),
    ("streams reset", "orders billing --to 0 -p 0", "0"),
    ("streams pause", "orders billing", "paused: 2"),
    ("streams resume", "orders billing", "resumed: 2"),
    ("streams grow", "orders 4", "orders has 4 partitions"),
    ("types drop", "nothing --yes", "!job type nothing not found"),
    ("types drop", "mail --yes --force", "dropped: mail"),
    ("pools drop", "nothing --yes", "!no such pool"),
    ("pools drop", "shop --yes --force", "dropped: shop"),
    ("streams drop", "orders --yes --force", "dropped: orders"),
    ("schedules", "", "no schedules"),
    ("schedules list", "", "no schedules"),
    ("schedules show", "nightly", "!no such schedule"),
    ("schedules runs", "nightly", "!no such schedule"),
    ("schedules run", "nightly", "!not found"),
    ("schedules drop", "nightly", "!not found"),
    ("keys list", "", "no keys"),
    ("keys create", "", ""),
    ("version", "", "0."),
]
# What needs the database itself, with arguments that are good enough to come that far.
NEED_THE_DATABASE = {
    "bulk enqueue": "--type mail x.parquet",
    "bulk export": "somewhere",
    "bulk replay": "--where true",
    "dashboard": "",
    "declare": "shop:app",
    "dequeue": "--downstream-url http://127.0.0.1:1",
    "exec": "true",
    "gearman": "--server 127.0.0.1:4730",
    "grant": "role reader",
    "history compact": "",
    "history failures": "",
    "history report": "",
    "history schedule": "'*/5 * * * *'",
    "history run": "",
    "history runs": "",
    "history status": "",
    "history vacuum": "",
    "history versions": "",
    "migrate": "",
    "prune": "",
    "restore check": "",
    "restore fence": "",
    "restore lake": "",
    "revoke": "role",
    "server": "",
    "streams writers forget": "totals",
    "streams writers list": "",
    "streams writers takeover": "totals",
    "up": "",
    "users add": "ada",
    "users list": "",
    "users remove": "ada",
    "worker": "shop:app",
}


def commands() -> Iterator[str]:
    """Every command, as it is written on the command line; a group that does something by itself is one."""

    def below(command: Any, *path: str) -> Iterator[str]:
        command = command.loaded() if isinstance(command, LazyCommand) else command
        subcommands = getattr(command, "commands", {})
        if path and (not subcommands or command.invoke_without_command):
            yield " ".join(path)
        for name, each in subcommands.items():
            yield from below(each, *path, name)

    yield from below(typer.main.get_command(app))


@pytest.fixture(scope="module")
def served(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url:
        asyncio.run(prepare(url))
        with serving(url) as served:
            yield served


async def prepare(url: str) -> None:
    """Two workers, of which one is of a fleet, and a dead letter."""
    async with Penstock(url) as app:
        spoiled = app.stream("spoiled", int, partitions=1)

        @spoiled.consumer(group="billing", on_failure="dead-letter")
        async def fail(batch: Batch[int]) -> None:
            raise ValueError("never")

        await spoiled.append(1)
        async with Workers(app):
            await eventually(lambda: found(app), "the dead letter")
        database = await app.database()
        for worker in ("w-of-none", "w-of-night"):
            await worker_queries.register_worker(database, worker, ["mail"], "web-3", 1, 1, timedelta(minutes=10))
        await fleets.start(database, "night", "shop:app", 1)
        await fleets.look(database, "night", "w-of-night", "web-3", "3.11")


async def found(app: Penstock) -> bool:
    return any(stream.name == "spoiled.dead" for stream in await app.list_streams())


@pytest.fixture
def through(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options with which a command works through the server. No database can be reached without it."""
    for name, value in (
        ("PENSTOCK_DATABASE_URL", "postgresql://127.0.0.1:1/none"),
        ("PENSTOCK_SERVER_TOKEN", f"admin.{TOKEN}"),
        ("PENSTOCK_SERVER_URL", served.base_url),
        ("NO_COLOR", "1"),
    ):
        monkeypatch.setenv(name, value)
    return ["--server", served.base_url]


def said(through: list[str], command: str, arguments: str) -> str:
    """What a command prints, or "!" and its error."""
    done = CliRunner().invoke(app, [*through, *command.split(), *shlex.split(arguments)])
    if isinstance(done.exception, PenstockError):
        return f"!{type(done.exception).__name__}: {done.exception.message}"
    # The doctor's exit code says how serious its findings are.
    assert done.exception is None or (command == "doctor" and done.exit_code in (1, 4)), (
        command,
        arguments,
        done.output,
        repr(done.exception),
    )
    return done.stdout


def test_every_command_has_its_case_here() -> None:
    assert set(commands()) == {command for command, _, _ in STEPS} | NEED_THE_DATABASE.keys()


def test_every_command_that_needs_the_database_is_run_by_another_test() -> None:
    """Of those that a server does not serve, this file has only the refusal."""
    run = {
        command
        for path in TESTS.rglob("*.py")
        if path != Path(__file__)
        for words in command_lines(ast.parse(path.read_text()))
        for command in NEED_THE_DATABASE
        if words[: len(command.split())] == command.split()
    }
    assert sorted(NEED_THE_DATABASE.keys() - run) == []


def command_lines(tests: ast.AST) -> Iterator[list[str]]:
    """What follows the word `penstock` in a call or a list, as in `penstock(url, "pause", "mail")` and `["penstock", "up"]`.

    Lists of arguments stand alone too, where a test gives them to a function of this name.
    """
    for node in ast.walk(tests):
        if isinstance(node, ast.Call | ast.List):
            words = list(words_of([node.func, *node.args] if isinstance(node, ast.Call) else node.elts))
            if "penstock" in words:
                following = words[words.index("penstock") + 1 :]
                yield [word for word in following if word]
            elif isinstance(node, ast.List):
                yield words


def words_of(nodes: Iterable[ast.expr]) -> Iterator[str]:
    """Constants, and the name of the function `penstock`; empty for anything else."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split() if node.value.startswith("penstock ") else [node.value]
        elif isinstance(node, ast.List | ast.Tuple):
            yield from words_of(node.elts)
        else:
            yield "penstock" if isinstance(node, ast.Name) and node.id == "penstock" else ""


def test_commands_work_through_a_server(through: list[str], served: Served) -> None:
    for command, arguments, expected in STEPS:
        found = said(through, command, arguments)
        assert expected.removeprefix("!").lower() in found.lower(), (command, arguments, found)
        assert found.startswith("!") == expected.startswith("!"), (command, arguments, found)
        if command == "streams create":
            with served.client() as client:
                joined = client.put("/v1/streams/orders/groups/billing/members/m", json={"dead_after_s": 600})
                joined.raise_for_status()


@pytest.mark.parametrize("command", NEED_THE_DATABASE)
def test_commands_that_need_the_database_say_so(through: list[str], command: str) -> None:
    found = said(through, command, NEED_THE_DATABASE[command])
    assert found == f"!{InvalidInput.__name__}: this needs the database itself"
