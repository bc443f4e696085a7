"""What one worker works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidInput
from penstock.jobs.worked import WorkedType
from penstock.pools.worked import WorkedPool
from penstock.schedules.schedule import Schedule
from penstock.schedules.times import Cron
from penstock.schedules.zones import rules_of
from penstock.streams.consumer.consumer import Consumer
from penstock.worker.leader import LeaderTask

_MOST_BYTES = 60_000
"""Of the names that a worker tells; the database takes 64 KiB."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one worker works on.

    Attributes:
        types: Job types with their handlers, by name.
        pools: Pools to take part in.
        consumers: Members of consumer groups to run.
        schedules: Timers and cron schedules.
        leader_tasks: Tasks of which one worker of all runs each.
        dispatches: Whether the worker sends its jobs to another service. `types` are then those of the database, to which others
            may be added; each job is recorded as begun before it starts, and none runs alone.
    """

    types: Mapping[str, WorkedType] = field(default_factory=dict)
    pools: Sequence[WorkedPool] = ()
    consumers: Sequence[Consumer[Any]] = ()
    schedules: Sequence[Schedule] = ()
    leader_tasks: Sequence[LeaderTask] = ()
    dispatches: bool = False

    def __post_init__(self) -> None:
        if not (self.without_end or self.consumers):
            raise InvalidInput("there is nothing to work on", hint="Declare a handler with @app.job(...) first.")

    @property
    def without_end(self) -> bool:
        """Whether there is work that does not end by itself, as a consumer does."""
        return bool(self.types or self.pools or self.schedules or self.leader_tasks or self.dispatches)

    @property
    def told(self) -> dict[str, list[str] | dict[str, str]]:
        """What there is beside job types: names by kind, times of schedules, rules of their zones; of very many the first."""
        kinds: dict[str, Sequence[Any]] = {
            "pools": self.pools,
            "consumers": self.consumers,
            "schedules": self.schedules,
            "leader_tasks": self.leader_tasks,
        }
        names: dict[str, list[str]] = {kind: [] for kind in kinds}
        left = _MOST_BYTES
        for kind, all in kinds.items():
            for one in all:
                left -= len(one.name.encode()) + 4
                if left > 0:
                    names[kind].append(one.name)
        specs: dict[str, str] = {}
        zones: dict[str, str] = {}
        for schedule in self.schedules:
            times = schedule.times
            left -= len(schedule.name.encode()) + len(times.spec.encode()) + 8
            if left > 0:
                specs[schedule.name] = times.spec
                if isinstance(times, Cron):
                    zones[times.tz] = rules_of(times.tz)
        return {**names, "schedule_specs": specs, "time_zones": zones}

    @property
    def handled(self) -> Mapping[str, WorkedType]:
        """The types of all jobs for which there is a handler, those of pools too."""
        keyed = {pool.name: pool.type for pool in self.pools if pool.type is not None}
        # The mapping itself: the types of a dispatcher are added to it later.
        return {**self.types, **keyed} if keyed else self.types
