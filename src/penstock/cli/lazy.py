"""Commands whose modules are imported when they are called, so that a short command starts without the code of the others.

A command of this kind stands for the real one in the list of commands, with its line of help. `tests/cli/test_imports.py`
compares these lines with those of the commands themselves, and says which modules a command must not import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "up": (
        "serving",
        "Run everything here: the database (embedded unless one is configured), its schema, a worker for an app, the HTTP API.",
    ),
    "worker": ("serving", "Run jobs until SIGTERM or Ctrl-C; a second signal stops at once."),
    "migrate": ("serving", "Create the schema penstock in the database, or bring it to this version."),
    "declare": ("serving", "Write what an app declares into the database: job types, pools, topics, streams."),
    "exec": (
        "serving",
        "Run a command that finds the database in DATABASE_URL (and libpq's variables); the embedded server runs until it ends.",
    ),
    "doctor": ("doctor", "Check everything that work depends on, and say what to do."),
    "enqueue": ("enqueueing", "Enqueue a job, or many from a file."),
    "pause": ("types", "Start no more jobs of a type; running ones go on."),
    "resume": ("types", "End a pause."),
    "stats": ("types", "How each job type is doing: waiting, running, finished in the last hour."),
    "top": ("top", "How everything is doing, live; and what fills the queue: types, keys."),
    "prune": ("types", "Drop the parts of the archive whose jobs have been kept for long enough."),
    "grant": (
        "types",
        "Let a database role read, enqueue, work, serve HTTP, or do everything; it replaces the access that the role had.",
    ),
    "revoke": ("types", "Take all access from a database role."),
    "gearman": ("gearman", "Serve subscribe_fanout, unsubscribe_fanout and fanout on gearmands until SIGTERM or Ctrl-C."),
    "server": ("http", "Serve the HTTP API and the dashboard until SIGTERM or Ctrl-C."),
    "dashboard": ("http", "Serve the dashboard alone, without the HTTP API, until SIGTERM or Ctrl-C."),
    "dequeue": ("http", "Send jobs to a downstream service and wait for its callbacks, until SIGTERM or Ctrl-C."),
    "leaders": ("leaders", "Tasks that one worker of all runs: which one, since when, and their errors."),
    "types": ("types", "Job types: list, create, change, drop."),
    "users": ("http", "Users of the HTTP API: list, add, remove."),
    "pools": (
        "standing",
        "Pools: list, create, drop, show, jobs, drain, undrain, resize, key, keys, pause-key, resume-key, weight, standing,"
        " start, stop, notify.",
    ),
    "scale": ("standing", "How many workers there should be."),
    "jobs": ("jobs", "Jobs: list, show, their steps, cancel, replay, change the priority."),
    "operations": ("operations", "Operations on all jobs that match a filter: list, show, cancel."),
    "restore": ("restoring", "After a restore of the database: what is ahead of it, and what to do."),
    "erase": ("erasing", "Remove all that belongs to a key, or to a value of a field of payloads, in an operation."),
    "history": ("history", "History: bring finished jobs into a lake of Parquet, and report on them."),
    "bulk": ("bulk", "Bulk work on Spark: enqueue, replay, export."),
    "fleet": ("fleet", "Fleets of workers on Spark: status, drain."),
    "workers": ("workers", "Workers: who works, and where; draining one."),
    "workflows": ("workflows", "Workflows: job groups and runs, how far they are; cancel, retry."),
    "schedules": ("schedules", "Schedules: next and last runs; running one now, dropping one."),
    "streams": ("streams", "Streams: create, append, tail, and consumer groups."),
    "topics": ("topics", "Topics: list, create, publish, subscribe, read."),
    "keys": ("keys", "Keys of encrypted payloads: making one, and their ids."),
}
"""Each command, with its module in this folder and the line that says what it does, in the order of the help."""


class LazyCommand(TyperCommand):
    """Stands for a command or a group of commands that is not imported yet.

    Args:
        name: Name of the command.
        module: Its module in `penstock.cli`.
        help: Its line of help.
    """

    def __init__(self, name: str, module: str, help: str) -> None:
        super().__init__(name, callback=None, help=help)
        self._module = module

    def loaded(self) -> Any:
        """The command itself."""
        module = import_module(f"penstock.cli.{self._module}")
        commands = typer.Typer()
        if hasattr(module, "add_to"):
            module.add_to(commands)
        else:
            commands.add_typer(module.app, name=self.name)
        return typer.main.get_group(commands).commands[str(self.name)]

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """The context of the command itself, which is called instead of this one."""
        return self.loaded().make_context(*args, **kwargs)


class LazyGroup(TyperGroup):
    """The group of all commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            **{name: LazyCommand(name, module, help) for name, (module, help) in COMMANDS.items()},
            **self.commands,
        }
