"""No part of Penstock calls an SQL function that the access which docs/deploying.md names for it may not call (P17).

Read from the code: a new call without a right fails here, also one on a path that no test takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.postgres.rights import ACCESSES, accesses
from tests.postgres.sql_calls import calls_of, functions_of_schema

PAGE = Path(__file__).parents[2] / "docs" / "deploying.md"
# Words of hints, which no part calls.
HINTS = {"grant_access", "drop_lake"}
# Asked for first: may_change_retention, may_vacuum.
IF_ALLOWED = {"change_retention": "retention:store", "finish_erasure": "queries:finish_erasure"}
OPENING = ["penstock.app:Penstock.open", "penstock.app:Penstock.close"]
# What administrators do over HTTP and in the dashboard: a server with the access server answers that it may not.
MANAGEMENT = {
    "cancel_erasure", "change_job_type", "change_pool", "change_stream", "convert_to_pool", "create_job_type", "create_stream",
    "drain_member", "drop_consumer_group", "drop_job_type", "drop_pool", "drop_schedule", "drop_stream", "grow_stream", "pause",
    "pause_key", "preview_erasure", "resize_pool", "resume", "resume_key", "set_weight", "start_erasure",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """The code of a part, and the access with which it runs."""

    access: str
    modules: list[str]
    parts: list[str] = field(default_factory=list)
    managing: set[str] = field(default_factory=set)


PARTS = {
    "worker": Part(
        "worker",
        ["penstock.worker.*", "-penstock.worker.doctor*", "-penstock.worker.administration*", "penstock.groups.membership"],
        [*OPENING, "penstock.app:Penstock.worker"],
    ),
    "scheduler": Part("worker", ["penstock.schedules.*", "-penstock.schedules.queries"], managing={"drop_schedule"}),
    "dequeuer": Part("worker", ["penstock.integrations.rickover.*"]),
    "server": Part("server", ["penstock.http.*", "-penstock.http.user_queries"], OPENING, MANAGEMENT),
    "dashboard": Part("server", ["penstock.http.dashboard.*"], OPENING, MANAGEMENT),
    "doctor": Part("reader", ["penstock.worker.doctor*"]),
    "Spark source": Part(
        "reader", [f"penstock.spark.{shape}.{name}" for shape in ("jobs", "streams") for name in ("source", "follower")]
    ),
    "Spark sink": Part(
        "producer",
        ["penstock.spark.jobs.sink", "penstock.spark.streams.sink", "penstock.spark.writing", "penstock.spark.staging"],
    ),
}


def test_the_page_names_the_access_of_each_part() -> None:
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {name: access for name, access in rows if name in PARTS} == {name: part.access for name, part in PARTS.items()}


def test_what_administrators_do_over_http_is_still_theirs() -> None:
    called = set(calls_of(PARTS["server"].modules))
    assert called >= MANAGEMENT, "what no route calls any more"
    assert {accesses()[function] for function in MANAGEMENT} == {"admin"}
    assert set(accesses()) <= functions_of_schema()


@pytest.mark.parametrize("name", PARTS)
def test_a_part_calls_only_what_its_access_may(name: str) -> None:
    part = PARTS[name]
    calls = calls_of(part.modules, part.parts)
    assert calls, "nothing was found"
    allowed = ACCESSES[: ACCESSES.index(part.access) + 1]
    refused = {
        function: place
        for function, place in calls.items()
        if accesses().get(function) not in allowed
        and function not in HINTS | part.managing
        and not place.endswith(IF_ALLOWED.get(function, "-"))
    }
    assert refused == {}, f"{name} has the access {part.access}"
