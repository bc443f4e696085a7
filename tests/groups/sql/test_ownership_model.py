"""The same traces of members go through the SQL of ownership and through the model that the simulation of tests/groups runs.

After each step both have the same members, owners, targets and epochs, and gave the same answers: what the simulation shows of
the model holds of the SQL.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Conflict, NotFound, Penstock
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.postgres.database import Database
from tests.groups.ownership_model import Group, Rules

SLOTS = 7
DEAD_AFTER = timedelta(seconds=10)


@dataclass(frozen=True)
class Step:
    """A call of one member; `session` and `epoch_off` sometimes make it a stale one."""

    act: str
    member: str
    session: int
    slots: frozenset[int]
    epoch_off: int


STEPS = st.builds(
    Step,
    st.sampled_from(["join", "join", "leave", "heartbeat", "take", "take", "release", "give_up", "fall_silent", "evict"]),
    st.sampled_from(["a", "b", "c", "d"]),
    st.sampled_from([0, 0, 0, 0, 1]),
    st.frozensets(st.integers(0, SLOTS - 1)) | st.just(frozenset(range(SLOTS))),
    st.sampled_from([0, 0, 0, 0, -1, 1]),
)


@dataclass
class Pair:
    """A group in the database and in the model, to which the same happens."""

    database: Database
    name: str
    model: Group
    now: float = 0.0
    sessions: dict[str, int] = field(default_factory=dict)

    async def do(self, step: Step) -> tuple[Any, Any]:
        """The answers of both."""
        self.now += 1.0
        member = step.member
        if step.act == "join":
            # The same session again, or a new one.
            self.sessions[member] = self.sessions.get(member, 0) + (step.epoch_off != 0 or member not in self.sessions)
        number = self.sessions.get(member, 0) + step.session
        act = getattr(self, step.act)
        answers: tuple[Any, Any] = await act(replace(step, session=number), UUID(int=number + 1))
        return answers

    async def join(self, step: Step, session: UUID) -> tuple[Any, Any]:
        try:
            await balance.join(self.database, self.name, step.member, session, DEAD_AFTER, {}, None)
            admitted = True
        except Conflict:
            admitted = False
        return admitted, self.model.join(step.member, step.session, self.now)

    async def leave(self, step: Step, session: UUID) -> tuple[Any, Any]:
        await balance.leave(self.database, self.name, step.member, session, None)
        self.model.leave(step.member, step.session)
        return None, None

    async def heartbeat(self, step: Step, session: UUID) -> tuple[Any, Any]:
        await self.silence(step.member, DEAD_AFTER, session)
        beat = await ownership.heartbeat(self.database, self.name, step.member, session)
        expected = self.model.heartbeat(step.member, step.session, self.now)
        return (beat.known, beat.owned, beat.revoked, beat.available), (
            expected.known, dict(expected.owned), expected.revoked, expected.available,
        )  # fmt: skip

    async def take(self, step: Step, session: UUID) -> tuple[Any, Any]:
        slots = sorted(step.slots)
        try:
            taken: Any = await ownership.take(self.database, self.name, step.member, session, slots)
        except NotFound:
            taken = None
        return taken, self.model.take(step.member, step.session, slots)

    async def release(self, step: Step, session: UUID) -> tuple[Any, Any]:
        held = {slot: self.model.slots[slot].epoch + step.epoch_off for slot in step.slots}
        await ownership.release(self.database, self.name, step.member, held)
        self.model.release(step.member, held)
        return None, None

    async def give_up(self, step: Step, session: UUID) -> tuple[Any, Any]:
        """Release what is to go elsewhere, as a member does."""
        held = {n: s.epoch for n, s in enumerate(self.model.slots) if s.owner == step.member and s.target != step.member}
        await ownership.release(self.database, self.name, step.member, held)
        self.model.release(step.member, held)
        return None, None

    async def fall_silent(self, step: Step, session: UUID) -> tuple[Any, Any]:
        """As if the last heartbeat were long ago."""
        await self.silence(step.member, timedelta(days=-1), None)
        if step.member in self.model.members:
            self.model.seen(step.member, float("-inf"))
            self.model.by_silence.move_to_end(step.member, last=False)
        return None, None

    async def evict(self, step: Step, session: UUID) -> tuple[Any, Any]:
        before = set(self.model.members)
        evicted = await balance.evict(self.database, self.name, None)
        self.model.evict(self.now)
        return set(evicted), before - set(self.model.members)

    async def silence(self, member: str, dead_after: timedelta, session: UUID | None) -> None:
        """A server that has just started counts as a heartbeat of all, so the time limit is what changes."""
        await self.database.fetch(
            "update penstock.members set dead_after = $3"
            " where group_name = $1 and id = $2 and ($4::uuid is null or session = $4)",
            self.name, member, dead_after, session,
        )  # fmt: skip

    async def state(self) -> tuple[Any, Any]:
        """Members and slots of both."""
        there = [member.id for member in await ownership.members(self.database, self.name)]
        slots = [(slot.owner, slot.target, slot.epoch) for slot in await ownership.slots(self.database, self.name)]
        expected = [(slot.owner, slot.target, slot.epoch) for slot in self.model.slots]
        return (there, slots), (list(self.model.members), expected)


async def first_difference(database: Database, name: str, steps: list[Step], rules: Rules) -> str | None:
    """Where the two part, if they do."""
    await ownership.declare_group(database, name, SLOTS, "sticky")
    pair = Pair(database, name, Group(SLOTS, DEAD_AFTER.total_seconds() * 1e6, rules=rules))
    for number, step in enumerate(steps):
        answer, expected = await pair.do(step)
        if answer != expected:
            return f"step {number}, {step}: the database answers {answer}, the model {expected}"
        state, expected = await pair.state()
        if state != expected:
            return f"after step {number}, {step}: the database has {state}, the model {expected}"
    return None


@pytest.fixture
def differ(url: str) -> Any:
    """Compare, from a test without a loop, on connections that stay open."""
    names = count()
    with asyncio.Runner() as runner:
        app = Penstock(url)
        database = runner.run(app.database())

        def compare(steps: list[Step], rules: Rules = Rules()) -> str | None:
            return runner.run(first_difference(database, f"g{next(names)}", steps, rules))

        yield compare
        runner.run(app.close())


def test_the_sql_and_the_model_agree_after_every_step(differ: Any) -> None:
    @given(st.lists(STEPS, min_size=5, max_size=40))
    @settings(max_examples=25)
    def agree(steps: list[Step]) -> None:
        assert differ(steps) is None

    agree()


ALL = frozenset(range(SLOTS))
JOINED = [Step("join", "a", 0, ALL, 0), Step("take", "a", 0, ALL, 0), Step("join", "b", 0, ALL, 0)]


@pytest.mark.parametrize(
    ("rules", "then"),
    [
        (Rules(wait_for_release=False), [Step("take", "b", 0, ALL, 0)]),
        (Rules(check_epoch=False), [Step("release", "a", 0, ALL, -1)]),
        (Rules(check_session=False), [Step("leave", "a", 1, ALL, 0)]),
    ],
)
def test_a_model_with_other_rules_is_told_from_the_sql(differ: Any, rules: Rules, then: list[Step]) -> None:
    assert differ(JOINED + then) is None
    assert differ(JOINED + then, rules) is not None
