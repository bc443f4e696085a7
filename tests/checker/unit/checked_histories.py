"""Histories of systems that keep their promises, made by chance: what a checker must pass, and what mutations then break."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

from tests.checker.history import Event, Gone
from tests.checker.jobs import Final, History, Planned, Rules
from tests.checker.keys import Ended, Placed
from tests.checker.streams import Committed, Consumed, Handled, Sent

RULES = {
    "plain": Rules(max_attempts=3),
    "once": Rules(at_most_once=True, max_attempts=1),
    "limited": Rules(concurrency=2, max_attempts=3),
}
DEAD_AFTER = 5.0
HEALED_WITHIN = 15.0
END = float("inf")
CHANCE = st.integers(0, 2**32 - 1).map(Random)
"""Hypothesis prints the seed of what fails."""


def assert_rejected(violations: list[str], promise: str) -> None:
    assert any(violation.startswith(f"{promise}:") for violation in violations), violations or "it passed"


@dataclass
class JobWorld:
    """A queue that keeps its promises. Time goes on by itself; each step does one thing that may happen."""

    chance: Random
    now: float = 0.0
    events: list[Event] = field(default_factory=list)
    final: list[Final] = field(default_factory=list)
    gone: list[Gone] = field(default_factory=list)
    planned: dict[str, Planned] = field(default_factory=dict)
    queued: dict[str, tuple[str, int]] = field(default_factory=dict)
    running: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    stopped: dict[str, float] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    workers: list[str] = field(default_factory=lambda: ["w0", "w1", "w2"])

    def say(self, kind: str, id: str, name: str, attempt: int = 0, worker: str = "", outcome: str = "") -> None:
        self.now += self.chance.uniform(0.01, 0.5)
        self.events.append(Event(kind, id, name, self.now, attempt, worker, outcome, f"payload of {id}"))

    def archive(self, id: str, name: str, status: str, attempt: int, worker: str = "") -> None:
        self.now += self.chance.uniform(0.001, 0.2)
        self.final.append(Final(id, name, status, attempt, True, self.now, worker, value=f"payload of {id}"))

    def enqueue(self) -> None:
        id, name = f"j{next(self.numbers)}", self.chance.choice(list(RULES))
        if self.chance.random() < 0.2:
            self.planned[id] = Planned(expires_at=self.now + 1.0)
        self.queued[id] = (name, 1)
        self.say("enqueued", id, name)

    def start(self) -> None:
        for id, (name, attempt) in self.chance.sample(sorted(self.queued.items()), len(self.queued)):
            busy = sum(kind == name for kind, _, _ in self.running.values())
            alive = [worker for worker in self.workers if worker not in self.stopped]
            if busy < (RULES[name].concurrency or 100) and alive:
                worker = self.chance.choice(alive)
                del self.queued[id]
                self.running[id] = (name, attempt, worker)
                self.say("started", id, name, attempt, worker)
                return

    def end(self) -> None:
        alive = [id for id, run in sorted(self.running.items()) if run[2] not in self.stopped]
        if not alive:
            return
        id = self.chance.choice(alive)
        name, attempt, worker = self.running.pop(id)
        failed = self.chance.random() < 0.4
        self.say("ended", id, name, attempt, worker, "failed" if failed else "succeeded")
        if not failed:
            self.archive(id, name, "succeeded", attempt, worker)
        else:
            self.back(id, name, attempt, worker)

    def back(self, id: str, name: str, attempt: int, worker: str) -> None:
        if attempt < RULES[name].max_attempts and not RULES[name].at_most_once:
            self.queued[id] = (name, attempt + 1)
        else:
            self.archive(id, name, "failed", attempt, worker)

    def cancel(self) -> None:
        if self.queued:
            id = self.chance.choice(sorted(self.queued))
            name, attempt = self.queued.pop(id)
            self.say("cancelling", id, name)
            self.archive(id, name, "cancelled", attempt - 1)
            self.say("cancelled", id, name)

    def expire(self) -> None:
        for id in sorted(self.queued):
            if id in self.planned and self.planned[id].expires_at < self.now:
                name, attempt = self.queued.pop(id)
                self.archive(id, name, "expired", attempt - 1)
                return

    def lose(self) -> None:
        """A worker is killed, or stopped for long; either way others have its jobs then. One that is back ends what it ran."""
        alive = [worker for worker in self.workers if worker not in self.stopped]
        worker = self.chance.choice(alive)
        at = self.now = self.now + 0.1
        held = {id: run for id, run in self.running.items() if run[2] == worker}
        killed = self.chance.random() < 0.5
        self.now += DEAD_AFTER
        for id, (name, attempt, _) in held.items():
            del self.running[id]
            self.back(id, name, attempt, worker)
        if killed:
            self.gone.append(Gone(worker, at))
            self.workers[self.workers.index(worker)] = f"v{next(self.numbers)}"
            return
        self.now += 0.5
        self.gone.append(Gone(worker, at, self.now))
        back = self.now
        for id, (name, attempt, _) in held.items():
            self.events.append(Event("ended", id, name, back + 0.2, attempt, worker, "failed", f"payload of {id}"))

    def history(self, steps: int) -> History:
        """So many steps, and then everything that is left, to its end."""
        for _ in range(steps):
            doing = [self.enqueue, self.start, self.start, self.end, self.end, self.cancel, self.expire, self.lose]
            self.chance.choices(doing, [6, 5, 5, 5, 5, 1, 2, 2])[0]()
        while self.queued or self.running:
            self.start()
            self.end()
        events = sorted(self.events, key=lambda event: event.at)
        return History(
            events, self.final, RULES, self.gone, planned=self.planned, healed_within=1e9 if steps > 60 else HEALED_WITHIN + steps
        )


@dataclass(frozen=True)
class KeyHistory:
    """What `check_keys` takes."""

    events: list[Event]
    placed: dict[str, Placed]
    ended: dict[str, Ended]
    gone: list[Gone]


def keys_in_order(chance: Random, keys: int, jobs: int) -> KeyHistory:
    """Keys whose jobs run in the order of their transactions, each key on one worker until that is gone."""
    events: list[Event] = []
    placed: dict[str, Placed] = {}
    ended: dict[str, Ended] = {}
    gone: list[Gone] = []
    for key in (f"k{n}" for n in range(keys)):
        now, worker = 0.0, f"{key}w0"
        transaction, place = 0, 0
        for n in range(jobs):
            name = f"{key}/{n}"
            if chance.random() < 0.5:
                transaction, place = transaction + 1, 0
            place += 1
            placed[name] = Placed(transaction, place, transaction * 1e-3, transaction * 1e-3 + 0.5e-3)
            for attempt in (1, 2, 3):
                now += chance.uniform(0.01, 0.3)
                events.append(Event("started", name, name, now, attempt, worker))
                fate = chance.choices(["succeeded", "failed", "lost"], [8, 1, 1])[0]
                now += chance.uniform(0.01, 0.3)
                if fate == "lost":
                    back = chance.choice([float("inf"), now + 6.0])
                    gone.append(Gone(worker, now, back))
                    if back < float("inf"):
                        events.append(Event("ended", name, name, back + 0.3, attempt, worker, "failed"))
                    worker = f"{key}w{len(gone)}"
                    now += 5.0
                else:
                    events.append(Event("ended", name, name, now, attempt, worker, fate))
                if fate == "succeeded" or attempt == 3:
                    ended[name] = Ended("succeeded" if fate == "succeeded" else "failed", attempt, now)
                    break
    return KeyHistory(sorted(events, key=lambda event: event.at), placed, ended, gone)


@dataclass(frozen=True)
class StreamHistory:
    """What the checkers of streams take."""

    log: dict[int, list[tuple[int, str, str]]]
    sent: list[Sent]
    appended: dict[str, list[str]]
    consumed: Consumed
    written: list[tuple[int, int, str]]


def stream_in_order(chance: Random, partitions: int, events: int) -> StreamHistory:
    """A log, and a group that handles and commits it batch by batch; sometimes an owner is killed before it commits."""
    log: dict[int, list[tuple[int, str, str]]] = {}
    handled: list[Handled] = []
    committed: list[Committed] = []
    gone: list[Gone] = []
    appended: dict[str, list[str]] = {}
    for partition in range(partitions):
        log[partition] = []
        for offset in range(events):
            key = f"{partition}-{chance.randrange(3)}"
            log[partition].append((offset, key, f"{key}:{offset}"))
            appended.setdefault(key, []).append(f"{key}:{offset}")
        now, done, owner = 0.0, 0, 0
        while done < events:
            now += chance.uniform(0.2, 0.4)
            size = min(chance.randrange(1, 5), events - done)
            worker, begun = f"p{partition}w{owner}", now
            for offset, key, value in log[partition][done : done + size]:
                now += 0.01
                handled.append(Handled("g", partition, offset, key, value, begun, now, worker))
            if chance.random() < 0.2:
                gone.append(Gone(worker, now + 0.01))
                owner += 1
                now += 5.0
                continue
            now += 0.05
            done += size
            committed.append(Committed(partition, done, now))
    sent = [Sent(partition, offset, value, key) for partition, rows in log.items() for offset, key, value in rows]
    written = [(partition, offset, value) for partition, rows in log.items() for offset, _, value in rows]
    handled.sort(key=lambda event: event.at)
    return StreamHistory(log, sent, appended, Consumed(handled, committed, gone), written)
