"""The checker of streams passes a log and a group in order, and rejects by name each way of breaking a promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from tests.checker.history import Gone
from tests.checker.streams import (
    Committed,
    Consumed,
    Handled,
    Sent,
    Stamped,
    check_epochs,
    check_exactly_once,
    check_group,
    check_log,
)
from tests.checker.unit.checked_histories import CHANCE, StreamHistory, assert_rejected, stream_in_order


def stream_of(history: StreamHistory) -> list[str]:
    return [
        *check_log(history.log, history.sent),
        *check_group(history.log, history.consumed, history.appended),
        *check_exactly_once(history.log, history.written),
    ]


@given(CHANCE)
@settings(max_examples=40)
def test_a_stream_that_is_kept_in_order_passes(chance: Random) -> None:
    assert stream_of(stream_in_order(chance, 2, 12)) == []


def handling(history: StreamHistory, handled: list[Handled]) -> StreamHistory:
    return replace(history, consumed=replace(history.consumed, handled=sorted(handled, key=lambda event: event.at)))


def event_is_never_handled(history: StreamHistory, chance: Random) -> StreamHistory:
    place = chance.choice([(event.partition, event.offset) for event in history.consumed.handled])
    return handling(history, [event for event in history.consumed.handled if (event.partition, event.offset) != place])


def event_is_handled_too_early(history: StreamHistory, chance: Random) -> StreamHistory:
    handled = list(history.consumed.handled)
    last = max((event for event in handled if event.partition == 0), key=lambda event: event.offset)
    return handling(history, [*handled, replace(last, begun=0.0, at=0.001)])


def event_has_another_value(history: StreamHistory, chance: Random) -> StreamHistory:
    handled = list(history.consumed.handled)
    place = chance.randrange(len(handled))
    return handling(history, [*handled[:place], replace(handled[place], value="another"), *handled[place + 1 :]])


def partition_has_several_owners(history: StreamHistory, chance: Random) -> StreamHistory:
    handled = list(history.consumed.handled)
    others = [
        replace(event, worker=f"other{n}", at=event.at + 1e-4) for n in range(2) for event in handled if event.partition == 0
    ]
    return handling(history, handled + others)


def event_comes_forty_times(history: StreamHistory, chance: Random) -> StreamHistory:
    event = history.consumed.handled[0]
    again = [replace(event, begun=event.at + n * 1e-5, at=event.at + (n + 0.5) * 1e-5, worker="w") for n in range(1, 40)]
    return handling(history, [*history.consumed.handled, *again])


def event_is_committed_before_it_is_handled(history: StreamHistory, chance: Random) -> StreamHistory:
    committed = list(history.consumed.committed)
    first = next(place for place, each in enumerate(committed) if each.next > 1 or each.partition == 0)
    committed[first] = replace(committed[first], at=-5.0)
    return replace(history, consumed=replace(history.consumed, committed=committed))


def event_comes_again_after_its_commit(history: StreamHistory, chance: Random) -> StreamHistory:
    event = history.consumed.handled[0]
    again = replace(event, begun=1e6, at=1e6 + 1, worker="w")
    return handling(history, [*history.consumed.handled, again])


def commit_goes_back(history: StreamHistory, chance: Random) -> StreamHistory:
    committed = [*history.consumed.committed, Committed(0, 0, 1e6)]
    return replace(history, consumed=replace(history.consumed, committed=committed))


def offsets_have_a_hole(history: StreamHistory, chance: Random) -> StreamHistory:
    return replace(
        history, log={**history.log, 0: [(offset + (offset > 5), key, value) for offset, key, value in history.log[0]]}
    )


def batch_is_appended_twice(history: StreamHistory, chance: Random) -> StreamHistory:
    rows = history.log[0]
    return replace(history, log={**history.log, 0: [*rows, (len(rows), *rows[0][1:])]})


def acknowledged_event_is_lost(history: StreamHistory, chance: Random) -> StreamHistory:
    return replace(history, sent=[*history.sent, Sent(0, len(history.log[0]), "lost")])


def acknowledged_event_is_elsewhere(history: StreamHistory, chance: Random) -> StreamHistory:
    return replace(history, sent=[replace(history.sent[0], offset=3), *history.sent[1:]])


def event_comes_from_no_producer(history: StreamHistory, chance: Random) -> StreamHistory:
    return replace(history, sent=history.sent[1:])


def key_is_handled_in_another_order(history: StreamHistory, chance: Random) -> StreamHistory:
    key = max(history.appended, key=lambda key: len(history.appended[key]))
    return replace(history, appended={**history.appended, key: history.appended[key][::-1]})


def event_is_written_twice(history: StreamHistory, chance: Random) -> StreamHistory:
    return replace(history, written=[*history.written, chance.choice(history.written)])


def event_is_never_written(history: StreamHistory, chance: Random) -> StreamHistory:
    return replace(history, written=history.written[1:])


def event_is_written_with_another_value(history: StreamHistory, chance: Random) -> StreamHistory:
    partition, offset, _ = history.written[0]
    return replace(history, written=[(partition, offset, "another"), *history.written[1:]])


STREAM_MUTATIONS: dict[Callable[[StreamHistory, Random], StreamHistory], str] = {
    event_is_never_handled: "P7",
    event_is_handled_too_early: "P7",
    event_has_another_value: "P7",
    partition_has_several_owners: "P4",
    event_comes_forty_times: "P7",
    event_is_committed_before_it_is_handled: "P7",
    event_comes_again_after_its_commit: "P7",
    commit_goes_back: "P4",
    offsets_have_a_hole: "P7",
    batch_is_appended_twice: "P10",
    acknowledged_event_is_lost: "P1",
    acknowledged_event_is_elsewhere: "P1",
    event_comes_from_no_producer: "P10",
    key_is_handled_in_another_order: "P7",
    event_is_written_twice: "P4",
    event_is_never_written: "P7",
    event_is_written_with_another_value: "P7",
}


@pytest.mark.parametrize("mutation", STREAM_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_stream_that_breaks_a_promise_is_rejected(mutation: Callable[[StreamHistory, Random], StreamHistory]) -> None:
    @given(CHANCE)
    @settings(max_examples=15)
    def rejected(chance: Random) -> None:
        assert_rejected(stream_of(mutation(stream_in_order(chance, 2, 12), chance)), STREAM_MUTATIONS[mutation])

    rejected()


def delivery(worker: str, begun: float, at: float) -> Handled:
    return Handled("g", 0, 0, "k", "v", begun, at, worker)


def one_event(handled: list[Handled], gone: list[Gone]) -> list[str]:
    return check_group({0: [(0, "k", "v")]}, Consumed(handled, gone=gone), {"k": ["v"]})


FROZEN = delivery("frozen", 1.0, 9.3)
"""Begun, frozen in the midst of it, and done with it after the thaw, which is after another one had the event."""
FREEZE = Gone("frozen", 1.5, 9.0)
NEXT = delivery("next", 5.0, 5.1)


def test_a_batch_that_is_done_late_by_a_frozen_owner_was_not_handed_out_again() -> None:
    assert one_event([NEXT, FROZEN], [FREEZE]) == []


def test_a_thawed_owner_may_begin_what_it_had_in_hand_before_it_learns_of_its_loss() -> None:
    assert one_event([NEXT, delivery("frozen", 9.1, 9.3)], [FREEZE]) == []


@pytest.mark.parametrize(
    "handled, gone",
    [
        ([NEXT, FROZEN], []),
        ([NEXT, FROZEN], [Gone("frozen", 6.0, 9.0)]),
        ([NEXT, FROZEN, delivery("third", 9.5, 9.6)], [FREEZE]),
        ([NEXT, delivery("frozen", 9.1, 9.3), delivery("third", 9.5, 9.6)], [FREEZE]),
        ([NEXT, delivery("frozen", 12.0, 12.1)], [FREEZE]),
    ],
    ids=["nothing happened", "frozen after the takeover", "and to a third", "and to a third, after the thaw", "long after"],
)
def test_what_comes_again_beside_a_freeze_is_rejected(handled: list[Handled], gone: list[Gone]) -> None:
    assert_rejected(one_event(handled, gone), "P7")


def test_a_commit_under_an_epoch_that_is_over_is_rejected() -> None:
    assert check_epochs([Stamped(0, 3, 3), Stamped(1, 7, 7)]) == []
    assert_rejected(check_epochs([Stamped(0, 3, 3), Stamped(0, 3, 4)]), "P4")


# -- appends in transactions that overlap, commit late, or are rolled back


def logged(*values: str) -> dict[int, list[tuple[int, str, str]]]:
    return {0: [(offset, "k", value) for offset, value in enumerate(values)]}


def sent(offset: int, value: str, transaction: int, begun: float, committed: float, place: int = 0) -> Sent:
    return Sent(0, offset, value, "k", transaction, place, begun, committed)


EARLY, LATE = (1, 1.0, 2.0), (2, 3.0, 9.0)
OVERLAPPING = (3, 1.5, 9.5)


@pytest.mark.parametrize(
    "appends",
    [
        [sent(0, "a", *EARLY), sent(1, "b", *LATE)],
        [sent(0, "a", *EARLY), sent(1, "b", *OVERLAPPING)],
        [sent(0, "b", *OVERLAPPING), sent(1, "a", *EARLY)],  # what overlaps may come in either order
        [sent(0, "b", *OVERLAPPING), sent(1, "a", *LATE)],
        [sent(0, "a", *LATE, place=0), sent(1, "b", *LATE, place=1)],
    ],
)
def test_appends_in_the_order_of_their_commits_pass(appends: list[Sent]) -> None:
    assert check_log(logged(*[each.value for each in appends]), appends) == []


@pytest.mark.parametrize(
    ("appends", "violation"),
    [
        # Committed before the other one began, and behind it.
        ([sent(0, "b", *LATE), sent(1, "a", *EARLY)], "P7: a at 0:1 lies behind b, whose append began after that of a"),
        (
            [sent(0, "b", *LATE), sent(1, "c", *OVERLAPPING), sent(2, "a", *EARLY)],
            "P7: a at 0:2 lies behind b, whose append began after that of a",
        ),
        ([sent(0, "b", *LATE, place=1), sent(1, "a", *LATE, place=0)], "P7: a at 0:1 lies behind b, which the same transaction"),
        (
            [sent(0, "a", *LATE), sent(1, "x", *OVERLAPPING), sent(2, "b", *LATE, place=1)],
            "P7: b at 0:2 lies behind x of another transaction, which came in between",
        ),
    ],
)
def test_appends_in_another_order_are_rejected(appends: list[Sent], violation: str) -> None:
    violations = check_log(logged(*[each.value for each in appends]), appends)
    assert any(each.startswith(violation) for each in violations), violations


def test_an_append_that_was_rolled_back_is_in_no_log_and_one_whose_commit_is_unknown_may_be() -> None:
    appends = [sent(0, "a", *EARLY)]
    assert check_log(logged("a"), appends, withdrawn=["x"], unknown=["y"]) == []
    assert check_log(logged("a", "y"), appends, withdrawn=["x"], unknown=["y"]) == []
    assert check_log(logged("a", "x"), appends, withdrawn=["x"]) == ["P1: x is in the log, though its append was rolled back"]
    assert_rejected(check_log(logged("a", "z"), appends, withdrawn=["x"], unknown=["y"]), "P10")


def test_an_event_that_was_rolled_back_and_handled_is_rejected() -> None:
    """A consumer that reads what is not committed yet."""
    handled = [Handled("g", 0, 0, "k", "a", 1.0, 1.1, "w"), Handled("g", 0, 1, "k", "x", 1.2, 1.3, "w")]
    assert_rejected(check_group(logged("a"), Consumed(handled), {}), "P7")


def test_a_group_that_passes_an_append_that_commits_late_is_rejected() -> None:
    """It takes offset 1 before offset 0 is committed, and then either misses that, or comes back to it."""
    passed = [Handled("g", 0, 1, "k", "b", 1.0, 1.1, "w")]
    assert_rejected(check_group(logged("a", "b"), Consumed(passed), {}), "P7")
    back = [*passed, Handled("g", 0, 0, "k", "a", 2.0, 2.1, "w"), Handled("g", 0, 1, "k", "b", 2.0, 2.2, "w")]
    assert_rejected(check_group(logged("a", "b"), Consumed(back), {}), "P7")
