"""A simulation of a whole group in virtual time: the protocol as a model, the real assignor, the real member state machine.

Messages between members and the database are delayed, lost on the way there (nothing happens) or back (the change happened, and
the member does not know), and sometimes so late that the sender has timed out. Members crash, return, leave, and are suspended
like a stopped process. The simulation checks at every step:

* no two conflicting writes to a slot are accepted: epochs never go back, and an epoch has one member;
* no two members work on a slot at the same time, unless one of them is suspended and therefore does not work;

and at the end, after a time without faults: every slot has its target as owner, and every member knows its slots.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.groups.assignors import Assignor, sticky
from penstock.groups.membership import looks_every
from penstock.groups.state import Change, MemberState
from tests.groups.ownership_model import Beat, Group, Rules

DEAD_AFTER = 10.0
INTERVAL = 5.0
TIMEOUT = 2.5


class Violation(AssertionError):
    """A promise was broken; the message says which, where and with which seed."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What goes wrong, while it does."""

    loss: float = 0.05
    very_late: float = 0.01
    crashes_per_s: float = 0.02  # of the whole group
    pauses_per_s: float = 0.05
    leaves_per_s: float = 0.02
    joins_per_s: float = 0.06


@dataclass(slots=True)
class Settings:
    """One simulated run."""

    seed: int
    members: int = 5
    slots: int = 32
    seconds: float = 300.0
    weather: Weather = field(default_factory=Weather)
    rules: Rules = field(default_factory=Rules)
    assignor: Assignor = sticky
    state: Callable[[], MemberState] = MemberState
    release_before_drain: bool = False
    write_every_s: float = 0.7
    rest_s: float = 120.0


class Process:
    """A member process: `member.py` without its database."""

    def __init__(self, world: World, id: str) -> None:
        self.world = world
        self.id = id
        self.session = world.new_session()
        self.state = world.settings.state()
        self.working: dict[int, int] = {}
        self.crashed = False
        self.paused_until = 0.0
        self.joined = False
        self.leaving = False
        self.gone = False
        self._call = 0
        self._due = 0.0
        self._woken = False
        self._in_call = False

    @property
    def works(self) -> bool:
        return not self.crashed and not self.gone and self.paused_until <= self.world.now

    def do(self, delay: float, action: Callable[[], None]) -> None:
        """Run something in this process later: not when it has crashed by then, and after its pause when it is paused."""

        def run() -> None:
            if self.crashed or self.gone:
                return
            if self.paused_until > self.world.now:
                self.world.at(self.paused_until + self.world.chance.random() * 1e-3, run)
            else:
                action()

        self.world.at(self.world.now + delay, run)

    def call(self, request: Callable[[], Any], answered: Callable[[Any], None]) -> None:
        """A call to the database; one at a time. Without an answer in time the round starts over."""
        self._call += 1
        number = self._call
        self._in_call = True

        def arrived() -> None:
            answer = request()
            self.world.deliver_notices()

            def back() -> None:
                if self._call == number:
                    self._call += 1
                    self._in_call = False
                    answered(answer)

            self.world.send(lambda delay: self.do(delay, back))

        def given_up() -> None:
            if self._call == number:
                self._call += 1
                self._in_call = False
                self.do(self.world.chance.uniform(0.2, 0.6), self.beat)

        self.world.send(lambda delay: self.world.at(self.world.now + delay, arrived))
        self.do(TIMEOUT, given_up)

    def start(self) -> None:
        self.join()
        self.care()

    def join(self) -> None:
        session = self.session
        self.call(lambda: self.world.group.join(self.id, session, self.world.now), self._joined)

    def _joined(self, admitted: bool) -> None:
        if admitted:
            self.joined = True
            self.beat()
        elif self.leaving:
            self._end()
        else:
            # The id is taken by one that will turn out to be dead.
            self.do(1.0, self.join)

    def wake(self) -> None:
        if self._in_call:
            self._woken = True
        else:
            self.beat()

    def beat(self) -> None:
        if self._in_call:
            return
        self._woken = False
        if not self.joined and not self.leaving:
            self.join()
            return
        sent_at, session = self.world.now, self.session
        self.call(
            lambda: self.world.group.heartbeat(self.id, session, self.world.now),
            lambda beat: self._heard(beat, sent_at),
        )

    def _heard(self, beat: Beat, sent_at: float) -> None:
        self.apply(self.state.answered(beat, sent_at, self.world.now))
        if not beat.known:
            if self.leaving:
                self._end()
            else:
                self.session, self.joined = self.world.new_session(), False
                self.join()
            return
        fence_at = self.state.fence_at
        self.do(max(0.0, fence_at - self.world.now) + 1e-6, lambda: self.apply(self.state.tick(self.world.now)))
        if releasing := self.state.releasing:
            self.call(lambda: self.world.group.release(self.id, releasing), lambda _: self._released(releasing))
        else:
            self._take()

    def _released(self, releasing: dict[int, int]) -> None:
        self.state.released(releasing)
        self._take()

    def _take(self) -> None:
        session = self.session
        if available := sorted(self.state.available):
            self.call(lambda: self.world.group.take(self.id, session, available), self._took)
        elif self.leaving and self.state.empty:
            self.call(lambda: self.world.group.leave(self.id, session), lambda _: self._end())
        else:
            self._rest()

    def _took(self, taken: dict[int, int] | None) -> None:
        if taken is not None:
            self.apply(self.state.took(taken, self.world.now))
        self._rest()

    def _rest(self) -> None:
        if self._woken:
            self.beat()
            return
        due = self._due = self.world.now + INTERVAL * self.world.chance.uniform(0.9, 1.0)
        self.do(due - self.world.now, lambda: self.beat() if self._due == due else None)

    def leave(self) -> None:
        self.leaving = True
        self.apply(self.state.stop())
        self.wake()

    def care(self) -> None:
        self.world.send(lambda delay: self.world.at(self.world.now + delay, self._evict))
        self.do(looks_every(len(self.world.group.members)) * self.world.chance.uniform(0.7, 1.3), self.care)

    def _evict(self) -> None:
        self.world.group.evict(self.world.now)
        self.world.deliver_notices()

    def _end(self) -> None:
        self.gone = True
        self.working.clear()

    def apply(self, changes: list[Change]) -> None:
        for change in changes:
            if change.kind == "gained":
                self.world.check_alone(self, change.slot)
                self.working[change.slot] = change.epoch
                self.world.workers.setdefault(change.slot, set()).add(self)
            elif change.kind == "lost":
                self._stop_work(change.slot, change.epoch)
            else:
                self._drain(change.slot, change.epoch)

    def _drain(self, slot: int, epoch: int) -> None:
        def drained() -> None:
            self._stop_work(slot, epoch)
            self.state.drained(slot, epoch)
            self.wake()

        if self.world.settings.release_before_drain:
            self.state.drained(slot, epoch)
            self.wake()
        self.do(self.world.chance.choice([0.0, 0.01, 0.5, 4.0]), drained)

    def _stop_work(self, slot: int, epoch: int) -> None:
        if self.working.get(slot) == epoch:
            del self.working[slot]
            self.world.workers[slot].discard(self)

    def write(self) -> None:
        """Commit under the epoch of some slot in work; the write may be late."""
        if self.works and self.working:
            slot, epoch = self.world.chance.choice(list(self.working.items()))
            self.world.send(lambda delay: self.world.at(self.world.now + delay, lambda: self._write(slot, epoch)))

    def _write(self, slot: int, epoch: int) -> None:
        if problem := self.world.group.commit(self.id, slot, epoch):
            self.world.fail(problem)


class World:
    """The database, the network, the members, and a clock that jumps from event to event."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.chance = random.Random(settings.seed)
        self.group = Group(settings.slots, DEAD_AFTER, settings.assignor, settings.rules)
        self.processes: dict[str, Process] = {}
        self.workers: dict[int, set[Process]] = {}
        self.now = 0.0
        self.steps = 0
        self.stormy = True
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._sessions = 0
        self._ids: list[str] = []

    def run(self) -> int:
        """Run it all; returns the number of steps. Raises `Violation`."""
        # The first members are there already, or ten thousand joins would take most of the time.
        for n in range(self.settings.members):
            self.group.seen(f"m{n}", 0.0)
            self._start(f"m{n}", joined=True)
        self.group.balance()
        for act, rate in (
            (self._crash, self.settings.weather.crashes_per_s),
            (self._pause, self.settings.weather.pauses_per_s),
            (self._leave, self.settings.weather.leaves_per_s),
            (self._join, self.settings.weather.joins_per_s),
            (self._write, self.settings.members / self.settings.write_every_s),
        ):
            self._again(act, rate)
        self._until(self.settings.seconds)
        self.stormy = False
        self._until(self.settings.seconds + self.settings.rest_s)
        self._check_rest()
        return self.steps

    def new_session(self) -> int:
        self._sessions += 1
        return self._sessions

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, action))

    def send(self, deliver: Callable[[float], None]) -> None:
        """Hand a message to the network."""
        chance, weather = self.chance, self.settings.weather
        if self.stormy and chance.random() < weather.loss:
            return
        if self.stormy and chance.random() < weather.very_late:
            deliver(chance.uniform(1.0, 40.0))
        else:
            deliver(chance.expovariate(200.0))

    def deliver_notices(self) -> None:
        told, self.group.told = self.group.told, set()
        for id in sorted(told):
            if (process := self.processes.get(id)) is not None:
                self.send(lambda delay, process=process: process.do(delay, process.wake))  # type: ignore[misc]

    def check_alone(self, process: Process, slot: int) -> None:
        for other in self.workers.get(slot, ()):
            if other is not process and other.works and slot in other.working:
                self.fail(f"slot {slot}: {process.id} begins while {other.id} works on it (epoch {other.working[slot]})")

    def fail(self, problem: str) -> None:
        raise Violation(f"seed {self.settings.seed}, {self.now:.3f} s, step {self.steps}: {problem}")

    def _until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            self.steps += 1
            action()
        self.now = end

    def _again(self, act: Callable[[], None], rate: float) -> None:
        if rate <= 0:
            return

        def step() -> None:
            if self.stormy:
                act()
                self._again(act, rate)

        self.at(self.now + self.chance.expovariate(rate), step)

    def _start(self, id: str, joined: bool = False) -> None:
        process = self.processes[id] = Process(self, id)
        self._ids.append(id)
        if joined:
            process.joined = True
            self.group.sessions[id] = process.session
            self.at(self.chance.uniform(0, INTERVAL), process.beat)
            process.care()
        else:
            process.start()

    def _any(self) -> Process | None:
        for _ in range(20):
            process = self.processes[self.chance.choice(self._ids)]
            if process.works:
                return process
        return None

    def _crash(self) -> None:
        if process := self._any():
            process.crashed = True
            if self.chance.random() < 0.5:
                # It comes back under its name, or under a new one.
                id = process.id if self.chance.random() < 0.5 else f"{process.id}'"
                self.at(self.now + self.chance.uniform(0.5, 20.0), lambda: self._start(id))

    def _pause(self) -> None:
        if process := self._any():
            process.paused_until = self.now + self.chance.choice([0.5, 5.0, 9.0, 15.0, 40.0])
            # It wakes up to find its time over; nothing else runs in it before.
            self.at(process.paused_until, lambda: process.apply(process.state.tick(self.now)) if process.works else None)

    def _leave(self) -> None:
        if (process := self._any()) and not process.leaving and len(self.group.members) > 1:
            process.leave()

    def _join(self) -> None:
        if sum(p.works for p in self.processes.values()) < self.settings.members * 1.5:
            self._start(f"n{self._number}")

    def _write(self) -> None:
        if process := self._any():
            process.write()

    def _check_rest(self) -> None:
        alive = {p.id for p in self.processes.values() if not p.crashed and not p.gone}
        if not alive:
            return
        if set(self.group.members) != alive:
            self.fail(f"members {sorted(self.group.members)[:5]}..., alive {sorted(alive)[:5]}...")
        problems = self.group.unsettled(balanced=self.settings.assignor is sticky)
        if problems:
            self.fail(f"not at rest: {problems[:5]}")
        for process in self.processes.values():
            if process.id in alive and not process.crashed:
                mine = {n: s.epoch for n, s in enumerate(self.group.slots) if s.owner == process.id}
                if process.working != mine:
                    self.fail(f"{process.id} works on {process.working}, has {mine}")
