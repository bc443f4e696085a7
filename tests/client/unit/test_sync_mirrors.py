"""The blocking halves have everything that the asynchronous classes have, in the same words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock import (
    JobGroup,
    JobType,
    LeaderTask,
    Operations,
    Penstock,
    Pool,
    PoolWorker,
    Producer,
    PulledJob,
    Schedule,
    Stream,
    Topic,
    Workflow,
)
from penstock.jobs.job_type import JobCall
from penstock.jobs.sync import SyncJobCall, SyncJobType
from penstock.operations.sync import SyncOperations
from penstock.pools.sync import SyncPool, SyncPoolWorker, SyncPulledJob
from penstock.schedules.sync import SyncSchedule
from penstock.streams.consumer.pull import Consumption
from penstock.streams.consumer.sync import SyncConsumption
from penstock.streams.reader import StreamReader
from penstock.streams.sync import SyncProducer, SyncStream, SyncStreamReader
from penstock.sync import SyncPenstock
from penstock.topics.sync import SyncTopic
from penstock.worker.sync import SyncLeaderTask
from penstock.workflows.sync import SyncJobGroup, SyncWorkflow
from scripts.generate_sync import MIRRORS, generated

PAIRS: list[tuple[type, type]] = [
    (Penstock, SyncPenstock),
    (JobType, SyncJobType),
    (JobCall, SyncJobCall),
    (Pool, SyncPool),
    (PoolWorker, SyncPoolWorker),
    (PulledJob, SyncPulledJob),
    (Stream, SyncStream),
    (Producer, SyncProducer),
    (StreamReader, SyncStreamReader),
    (Consumption, SyncConsumption),
    (Topic, SyncTopic),
    (Operations, SyncOperations),
    (Schedule, SyncSchedule),
    (LeaderTask, SyncLeaderTask),
    (JobGroup, SyncJobGroup),
    (Workflow, SyncWorkflow),
]
# What only a loop can use: it is asynchronous itself.
ASYNCHRONOUS = {
    "Penstock.database",
    "Penstock.worker",
    "Penstock.run_worker",
    "JobType.ensure",
    "JobType.declare_if_allowed",
    "Pool.declare_type",
    # A pulled job has no steps: its program does not run again by itself.
    *(f"PulledJob.{name}" for name in ("step", "sleep", "wait_for", "gather")),
}
# Classes that handlers and consumers get from a worker, which has a loop.
OF_WORKERS = {"Batch", "Events", "Job", "Leader", "Lifespan", "Standing"}


def asynchronous_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The coroutines of a class, and its own plain methods that return something asynchronous."""
    found = {}
    mirrored = {pair[0].__name__ for pair in PAIRS}
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_"):
            continue
        returned = re.split(r"[\[ ]", str(inspect.signature(method).return_annotation))[0]
        # What an application declares is declared for both halves.
        gives = returned in mirrored and name in vars(kind)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method) or gives:
            found[name] = method
    return found


def words(signature: inspect.Signature) -> list[str]:
    """A signature as it is written, in the words of the asynchronous half."""
    said = [str(parameter) for parameter in signature.parameters.values()]
    return [*said, re.sub(r"\bA?[Ss]ync(?=[A-Z])", "", str(signature.return_annotation))]


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS, ids=[pair[0].__name__ for pair in PAIRS])
def test_every_asynchronous_method_has_a_blocking_one(asynchronous: type, blocking: type) -> None:
    expected = {
        "close" if name == "aclose" else name: method
        for name, method in asynchronous_methods(asynchronous).items()
        if f"{asynchronous.__name__}.{name}" not in ASYNCHRONOUS
    }
    missing = expected.keys() - set(dir(blocking))
    assert not missing, f"{blocking.__name__} has no {', '.join(sorted(missing))}"
    for name, method in expected.items():
        assert words(inspect.signature(getattr(blocking, name))) == words(inspect.signature(method)), name
        assert getattr(blocking, name).__doc__.split()[0] == (method.__doc__ or "").split()[0], name


def test_every_public_class_with_coroutines_has_a_blocking_half() -> None:
    public = {name: kind for name in penstock.__all__ if inspect.isclass(kind := getattr(penstock, name))}
    found = {name for name, kind in public.items() if asynchronous_methods(kind)}
    assert found - OF_WORKERS <= {pair[0].__name__ for pair in PAIRS}
    assert {mirror.name for mirrors in MIRRORS.values() for mirror in mirrors} == {pair[0].__name__ for pair in PAIRS}


def test_the_generated_files_are_up_to_date() -> None:
    stale = [path.name for path, text in generated() if path.read_text() != text]
    assert not stale, f"run `make format`: {stale}"
