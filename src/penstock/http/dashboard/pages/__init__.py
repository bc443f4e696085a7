"""The pages: a module for each, with what it shows and what it changes. A new page is a module here, a line below and a template.

Paths are matched in the order of this list.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.http.dashboard.pages import (
    dead_letters,
    failures,
    health,
    history,
    job,
    jobs,
    operations,
    overview,
    pools,
    schedules,
    streams,
    topics,
    types,
    workers,
    workflows,
)
from penstock.http.dashboard.view import Action, Page

_MODULES = (
    overview, jobs, job, failures, types, pools, streams, dead_letters, topics, workflows, workers, schedules, operations, health,
    history,
)  # fmt: skip
PAGES: list[Page] = [page for module in _MODULES for page in module.PAGES]
ACTIONS: list[Action] = [action for module in _MODULES for action in getattr(module, "ACTIONS", [])]


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the navigation, with the key that follows `g`."""

    title: str
    path: str
    key: str
    all_types: bool = False


NAVIGATION = [
    Entry("Overview", "", "o"),
    Entry("Jobs", "jobs", "j"),
    Entry("Failures", "failures", "f"),
    Entry("Job types", "types", "t"),
    Entry("Pools", "pools", "l"),
    Entry("Streams", "streams", "s"),
    Entry("Topics", "topics", "c"),
    Entry("Workflows", "workflows", "k", all_types=True),
    Entry("Workers", "workers", "w"),
    Entry("Schedules", "schedules", "d"),
    Entry("Operations", "operations", "p"),
    Entry("History", "history", "y"),
    Entry("Health", "health", "h", all_types=True),
]
