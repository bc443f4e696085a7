"""What the checkers say of what the database did: each way of being wrong is rejected by name, and what is right passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.checker.history import Event, Gone
from tests.checker.jobs import Final, History, Rules, check_jobs
from tests.checker.noted import Noted
from tests.checker.uniques import Asked, check_uniques

RULES = {"plain": Rules(max_attempts=3), "once": Rules(at_most_once=True, max_attempts=1)}
DEAD = Noted("dead", 5.0, "w", silent_s=2.1, dead_after_s=2.0)

# A worker that could not reach the database for a while: others had its job, and it stopped when it learned of that.
TAKEN = History(
    [
        Event("enqueued", "a", "plain", 0.5),
        Event("started", "a", "plain", 1.0, 1, "w"),
        Event("ended", "a", "plain", 8.1, 1, "w", "interrupted"),
        Event("started", "a", "plain", 5.2, 2, "v"),
        Event("ended", "a", "plain", 6.0, 2, "v", "succeeded"),
    ],
    [Final("a", "plain", "succeeded", 2, True, 6.1, "v")],
    RULES,
    cut=[Gone("w", 2.0, 8.0)],
    noted=[
        Noted("registered", 0.0, "w"),
        Noted("claimed", 0.9, "w", "a", "plain", 1, 7),
        DEAD,
        Noted("back", 5.0, "w", "a", "plain", 1, 7),
        Noted("claimed", 5.1, "v", "a", "plain", 2, 7),
        Noted("over", 6.1, "v", "a", "plain", 2),
        Noted("registered", 8.0, "w"),
    ],
)


def noted(history: History, *more: Noted) -> History:
    return replace(history, noted=sorted([*history.noted, *more], key=lambda note: note.at))


def without(history: History, what: str) -> History:
    return replace(history, noted=[note for note in history.noted if note.what != what])


def ended(history: History, at: float) -> History:
    return replace(history, events=[replace(e, at=at) if e.outcome == "interrupted" else e for e in history.events])


BEHIND = (Noted("claimed", 10.0, "v", "b", "plain", 1, 8), Noted("claimed", 50.0, "v", "b", "plain", 2, 8))
LATE = replace(TAKEN, noted=[replace(note, at=90.0) if note.number == 2 else note for note in TAKEN.noted])
KILLED = replace(TAKEN, gone=[Gone("w", 2.0)], cut=[], events=[e for e in TAKEN.events if e.outcome != "interrupted"])
UNSTARTED = History(
    [Event("begun", "a", "once", 1.0, 1, "w")], [Final("a", "once", "failed", 1, True, 6.0, "w")], RULES, gone=[Gone("w", 1.1)]
)
SENT = History(
    [
        *[Event("started", "a", "plain", at, at, "service") for at in (1, 2)],
        *[Event("ended", "a", "plain", at + 0.5, at, "service", "failed") for at in (1, 2)],
        Event("begun", "a", "plain", 3.0, 3, "w"),
    ],
    [Final("a", "plain", "failed", 3, True, 6.0)],
    RULES,
    gone=[Gone("w", 3.1)],
)


# Enqueued in a transaction that was committed at 6.0. Before that, b, behind it, had been enqueued and claimed.
COMMITTED_LATE = History(
    [
        Event("enqueued", "b", "plain", 1.0),
        Event("started", "b", "plain", 1.2, 1, "w"),
        Event("ended", "b", "plain", 1.3, 1, "w", "succeeded"),
        Event("enqueued", "a", "plain", 6.0),
        Event("started", "a", "plain", 7.1, 1, "w"),
        Event("ended", "a", "plain", 7.2, 1, "w", "succeeded"),
    ],
    [Final("a", "plain", "succeeded", 1, True, 7.3, "w"), Final("b", "plain", "succeeded", 1, True, 1.4, "w")],
    RULES,
    noted=[Noted("claimed", 1.1, "w", "b", "plain", 1, 8), Noted("claimed", 7.0, "w", "a", "plain", 1, 7)],
    withdrawn=["x"],
)


def claimed_late(at: float, behind: float) -> History:
    """The late job is claimed at `at`, and another one behind it, which was enqueued later, at `behind`."""
    first, late = COMMITTED_LATE.noted
    return replace(COMMITTED_LATE, noted=[first, Noted("claimed", behind, "w", "c", "plain", 1, 9), replace(late, at=at)])


def begun(at: float) -> History:
    """The worker that lost a job begins another one; it has returned at 8.0, and does not register again before 20.0."""
    events = [Event("started", "b", "plain", at, 1, "w"), Event("ended", "b", "plain", at + 0.1, 1, "w", "succeeded")]
    return replace(
        TAKEN,
        events=[*TAKEN.events, *events],
        final=[*TAKEN.final, Final("b", "plain", "succeeded", 1, True, at + 0.2, "w")],
        noted=[replace(note, at=20.0) if note.what == "registered" and note.at > 0 else note for note in TAKEN.noted],
    )


def quarantined(losses: int, failures: int = 0) -> History:
    """A job that failed some times, and was then lost some times with its worker, each time another one."""
    events, gone = [], []
    for attempt in range(1, failures + losses + 1):
        events.append(Event("started", "a", "killer", 10.0 * attempt, attempt, f"w{attempt}"))
        if attempt <= failures:
            events.append(Event("ended", "a", "killer", 10.0 * attempt + 1, attempt, f"w{attempt}", "failed"))
        else:
            gone.append(Gone(f"w{attempt}", 10.0 * attempt + 1))
    final = Final("a", "killer", "failed", failures + losses, True, 10.0 * (failures + losses) + 6, reason="quarantined")
    return History(events, [final], {"killer": Rules(max_attempts=9)}, gone)


def convicted_beside(attempt: int) -> History:
    """A job that was lost three times with its worker, once while another one ran there."""
    history = quarantined(3)
    beside = [
        Event("started", "b", "killer", 10.0 * attempt + 0.5, 1, f"w{attempt}"),
        Event("started", "b", "killer", 50.0, 2, "w9"),
    ]
    ended = [Event("ended", "b", "killer", 51.0, 2, "w9", "succeeded")]
    final = Final("b", "killer", "succeeded", 2, True, 51.1, "w9")
    return replace(history, events=[*history.events, *beside, *ended], final=[*history.final, final], healed_within=1000.0)


@pytest.mark.parametrize(
    "history",
    [
        COMMITTED_LATE,
        claimed_late(30.0, 20.0),
        claimed_late(30.0, 28.0),
        TAKEN,
        KILLED,
        UNSTARTED,
        SENT,
        begun(8.5),
        begun(20.5),
        quarantined(3),
        quarantined(3, 2),
    ],
)
def test_what_is_right_passes(history: History) -> None:
    assert check_jobs(history) == []


@pytest.mark.parametrize(
    ("history", "violation"),
    [
        # Without the loss in the database two workers had it at once.
        (without(TAKEN, "dead"), "P4: plain a began on v"),
        (noted(TAKEN, replace(DEAD, worker="u", silent_s=0.3)), "P4: u was declared dead 0.300 s after its last heartbeat"),
        (replace(TAKEN, cut=[]), "P4: w was declared dead at 5.000 while it ran and could reach the database"),
        (replace(TAKEN, cut=[Gone("u", 2.0, 8.0)]), "P4: w was declared dead at 5.000 while it ran"),
        (ended(TAKEN, 14.0), "P4: plain a ran on on w for 6.000 s after that had learned of its loss"),
        (noted(LATE, *BEHIND), "P9: plain a was back in its line at 5.000, and b behind it was claimed at 50.000"),
        (
            replace(KILLED, healed_within=15.0, noted=[replace(n, at=20.0) if n.what == "back" else n for n in KILLED.noted]),
            "P9: a of a worker that was gone was without one for 18.0 s",
        ),
        (
            replace(TAKEN, noted=[replace(n, crashes=2, seq=0) if n.what == "back" else n for n in LATE.noted]),
            "P9: plain a waited for 85.0 s to run alone",
        ),
        (
            claimed_late(40.0, 22.0),
            "P9: plain a was committed at 6.000, and c behind it was claimed at 22.000, before it was at 40",
        ),
        (replace(COMMITTED_LATE, withdrawn=["a"]), "P1: a was started, though the transaction that enqueued it was rolled back"),
        (
            replace(COMMITTED_LATE, final=[*COMMITTED_LATE.final, Final("x", "plain", "cancelled", 0, True, 9.0)]),
            "P1: x is there, though the transaction that enqueued it was rolled back",
        ),
        (
            replace(
                COMMITTED_LATE,
                events=COMMITTED_LATE.events[:4],
                final=[Final("a", "plain", "queued", 0, False), COMMITTED_LATE.final[1]],
            ),
            "P2: plain a is queued after the drain",
        ),
        (begun(10.0), "P4: plain b began on w 2.000 s after that was declared dead"),
        (quarantined(1), "P2: killer a was archived as failed after 1 of 9 attempts"),
        (convicted_beside(1), "P9: killer a was quarantined after 2 losses of workers that ran nothing else, it takes 3"),
        (convicted_beside(3), "P9: killer a was quarantined after 2 losses of workers that ran nothing else, it takes 3"),
        (quarantined(2), "P2: killer a was archived as failed after 2 of 9 attempts"),
        (quarantined(2, 2), "P2: killer a was archived as failed after 4 of 9 attempts"),
        (replace(UNSTARTED, events=[]), "P2: once a was archived as failed though it was never started"),
        (replace(UNSTARTED, gone=[Gone("w", 30.0)]), "P2: once a was archived as failed though it was never started"),
        (replace(UNSTARTED, places=0), "P2: 1 jobs that w had begun failed and never started"),
        (replace(SENT, gone=[]), "P2: plain a was archived as failed after 2 of 3 attempts"),
        (replace(SENT, events=SENT.events[:-1]), "P2: plain a was archived as failed after 2 of 3 attempts"),
    ],
)
def test_what_is_wrong_is_rejected(history: History, violation: str) -> None:
    violations = check_jobs(history)
    assert any(each.startswith(violation) for each in violations), violations


QUEUED = [Noted("claimed", 5.0, "w", "a", "plain", 1), Noted("back", 7.0, "w", "a", "plain", 1), Noted("over", 9.0, id="a")]


def asked(id: str, new: bool, begun: float) -> Asked:
    return Asked("key", id, new, begun, begun + 0.1)


@pytest.mark.parametrize(
    ("second", "violation"),
    [
        (asked("b", True, 3.0), "P10: b was enqueued with key while a was queued with it"),
        (asked("a", False, 6.0), "P10: an enqueue with key returned a, which was no longer queued"),
        (asked("a", False, 9.5), "P10: an enqueue with key returned a, which was no longer queued"),
        (asked("b", True, 6.0), None),
        (asked("a", False, 3.0), None),
        (asked("a", False, 8.0), None),
        (asked("b", True, 4.95), None),  # claimed before the answer
    ],
)
def test_a_job_coalesces_while_it_is_queued(second: Asked, violation: str | None) -> None:
    assert check_uniques([asked("a", True, 1.0), second], QUEUED) == ([] if violation is None else [violation])
