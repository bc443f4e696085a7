"""How job types share the places of a lane, played through in virtual time: no database and no handler."""

from __future__ import annotations

import heapq
import math
import random
import secrets
from collections import Counter
from dataclasses import dataclass, field

import pytest

from penstock.worker.lanes import Lane, Plan, Share

LOOK_S = 0.002
POLL_S = 1.0


@dataclass
class World:
    """A lane, the queues in the database, and sources that claim some of the types each."""

    places: int
    sources: list[list[str]]
    durations: dict[str, float]
    dice: random.Random
    now: float = 0.0
    backlog: Counter[str] = field(default_factory=Counter)
    started: list[str] = field(default_factory=list)
    longest_wait: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lane: Lane[str] = Lane(self.places, 1_000, lambda: self.now)
        self.types = [name for source in self.sources for name in source]
        self._events: list[tuple[float, int, str, object]] = []
        self._number = 0
        self._since: dict[str, float] = {}
        self._looking: set[int] = set()
        for source in range(len(self.sources)):
            self._at(0.0, "poll", source)

    def _at(self, delay: float, kind: str, what: object) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + delay, self._number, kind, what))

    def arrive(self, name: str, jobs: int, at: float = 0.0) -> None:
        self._at(at, "arrive", f"{name} {jobs}")

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, kind, what = heapq.heappop(self._events)
            if kind == "arrive":
                assert isinstance(what, str)
                name, _, jobs = what.partition(" ")
                self.backlog[name] += int(jobs)
            elif kind == "end":
                self._end(what)  # type: ignore[arg-type]
            else:
                self._look(what)  # type: ignore[arg-type]
                if kind == "poll":
                    self._at(POLL_S, "poll", what)
            self._note_waits()
            assert 0 <= self.lane.busy <= self.places
        self.now = until

    def _end(self, share: Share[str]) -> None:
        share.busy -= 1
        self.lane.busy -= 1
        self.lane.done += 1
        if share.measure:
            share.ran(self.durations[share.name])
        self._fill()
        self._made_room()

    def _made_room(self) -> None:
        for source in self.dice.sample(range(len(self.sources)), len(self.sources)):
            if source not in self._looking:
                self._looking.add(source)
                self._at(LOOK_S * self.dice.random(), "look", source)

    def _look(self, source: int) -> None:
        self._looking.discard(source)
        plan = self.lane.plan(self.sources[source], 1_000)
        if plan.limit <= 0:
            return
        found = self._claim(plan)
        for name in found:
            share = self.lane.share(name)
            share.waiting.extend([name] * found[name])
            self.lane.queued[name] = share
        self._fill()
        if self.lane.looked(plan, found):
            self._made_room()
        if found:
            self._looking.add(source)
            self._at(LOOK_S, "look", source)

    def _claim(self, plan: Plan) -> Counter[str]:
        """As penstock.claim."""
        left, found = plan.limit, Counter[str]()
        names = [(name, most) for name, most in zip(plan.names, plan.most, strict=True) if self.backlog[name]]
        types = len(names)
        for turn, (name, most) in enumerate(names, 1):  # the list grows
            part = min(math.ceil(left / ((types if turn <= types else len(names)) - turn + 1)), most)
            taken = min(part, self.backlog[name], left)
            self.backlog[name] -= taken
            found[name] += taken
            left -= taken
            if turn <= types and taken == part:
                names.append((name, most - taken))
        return +found

    def _fill(self) -> None:
        while dealt := self.lane.deal():
            for share, places in dealt:
                for _ in range(min(places, len(share.waiting))):
                    share.waiting.popleft()
                    share.busy += 1
                    self.lane.busy += 1
                    self.started.append(share.name)
                    self._at(self.durations[share.name], "end", share)
                if not share.waiting:
                    self.lane.queued.pop(share.name, None)

    def _note_waits(self) -> None:
        for name in self.types:
            share = self.lane.share(name)
            if share.busy or not (self.backlog[name] or share.waiting):
                since = self._since.pop(name, self.now)
            else:
                since = self._since.setdefault(name, self.now)
            self.longest_wait[name] = max(self.longest_wait.get(name, 0.0), self.now - since)


@pytest.fixture
def dice() -> random.Random:
    seed = secrets.randbits(32)
    print("seed", seed)
    return random.Random(seed)


def world(dice: random.Random, places: int, *sources: list[str], **durations: float) -> World:
    return World(places, list(sources), {name: durations.get(name, 15.0) for source in sources for name in source}, dice)


@pytest.mark.parametrize("sources", [[["slow", "other"]], [["slow"], ["other"]], [["other"], ["slow"]]])
def test_a_type_that_has_work_gets_a_place_before_another_gets_its_last(sources: list[list[str]], dice: random.Random) -> None:
    them = world(dice, 2, *sources)
    them.arrive("slow", 1_000)
    them.arrive("other", 1)
    them.run(until=5.0)
    if len(sources) == 1:
        assert sorted(them.started) == ["other", "slow"], "it started although none of the slow ones has ended"
    # Which source looks first is chance: the next place at the latest.
    them.run(until=17.1)
    assert "other" in them.started


def test_one_type_has_all_places_when_no_other_has_work(dice: random.Random) -> None:
    them = world(dice, 16, ["slow", *[f"idle{number}" for number in range(9)]], ["pool"])
    them.arrive("slow", 1_000)
    them.run(until=1.0)
    assert them.lane.busy == 16
    them.run(until=46.5)
    assert len(them.started) == 4 * 16
    assert them.lane.busy == 16


def test_a_type_that_begins_to_have_work_gets_the_next_place(dice: random.Random) -> None:
    them = world(dice, 3, ["slow", "other"])
    them.arrive("slow", 1_000)
    them.arrive("other", 1, at=5.0)
    them.run(until=16.5)
    assert them.started[:3] == ["slow"] * 3
    assert them.started[3] == "other"


def test_more_types_than_places_take_turns(dice: random.Random) -> None:
    names = [f"t{number}" for number in range(5)]
    them = world(dice, 2, names)
    for name in names:
        them.arrive(name, 100)
    them.run(until=200.0)
    assert len(them.started) > 20
    for begin in range(0, len(them.started) - 5, 5):
        assert sorted(them.started[begin : begin + 5]) == names


def test_a_short_type_does_not_bring_jobs_of_a_long_one_before_their_places(dice: random.Random) -> None:
    them = world(dice, 4, ["short", "long"], short=0.01, long=600.0)
    them.arrive("short", 10_000)
    them.arrive("long", 1_000, at=3.0)
    them.run(until=10.0)
    long = them.lane.share("long")
    assert long.busy + len(long.waiting) <= 4
    assert them.backlog["long"] >= 996


@pytest.mark.parametrize("run", range(10))
def test_no_type_waits_longer_than_its_turn(run: int, dice: random.Random) -> None:
    for _ in range(4):
        places, types = dice.randint(1, 8), dice.randint(2, 8)
        names = [f"t{number}" for number in range(types)]
        cut = dice.choice([types, types, dice.randint(1, types)])
        sources = [names[:cut], *[[name] for name in names[cut:]]]
        them = World(places, sources, {name: dice.choice([0.02, 0.3, 2.0, 15.0, 40.0]) for name in names}, dice)
        for name in names:
            for _ in range(dice.randint(0, 4)):
                them.arrive(name, dice.choice([1, 3, 50, 2_000]), at=dice.uniform(0, 60))
        them.run(until=400.0)
        longest = max(them.durations.values())
        # Beside its turn: the interval at which a full worker looks for other types, and the looks themselves.
        bound = longest * math.ceil(types / places) + 2 * POLL_S + 0.2
        assert all(wait <= bound for wait in them.longest_wait.values()), (
            places,
            sources,
            them.durations,
            them.longest_wait,
            bound,
        )
