"""The garbage collector while workers run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.core.garbage_collection import fewer_collections


@pytest.fixture(autouse=True)
def usual() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_the_threshold_is_higher_until_the_last_worker_has_ended(usual: tuple[int, int, int]) -> None:
    first, second = fewer_collections(), fewer_collections()
    for worker in (first, second):
        worker.__enter__()
        assert gc.get_threshold() == (20_000, 10, 10)
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (20_000, 10, 10)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("chosen", [(0, 10, 10), (50_000, 5, 5)])
def test_what_the_application_chose_stays(chosen: tuple[int, int, int]) -> None:
    gc.set_threshold(*chosen)
    with fewer_collections():
        assert gc.get_threshold() == chosen
    assert gc.get_threshold() == chosen


def test_what_is_chosen_while_a_worker_runs_stays() -> None:
    with fewer_collections():
        gc.set_threshold(5_000, 10, 10)
    assert gc.get_threshold() == (5_000, 10, 10)
