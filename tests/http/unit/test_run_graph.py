"""The layout of graphs and what the boxes say: layers, order, distances, and runs that are too large to be drawn."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import combinations
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.http.dashboard.graph_layout import HEIGHT, MOST_LINES, MOST_PARTS, WIDTH, lay_out, layers_of
from penstock.http.dashboard.run_graph import graph_of
from penstock.workflows.models import WorkflowStepRecord

AT = datetime(2026, 1, 11, 18, 26, 26, tzinfo=UTC)
After = tuple[tuple[int, ...], ...]


def step(place: int, after: list[int], status: str = "succeeded", **other: object) -> WorkflowStepRecord:
    values: dict[str, object] = {
        "place": place, "name": f"step {place}", "type": "shop", "job": UUID(int=place), "jobs": None, "carried": 0,
        "after": after, "at_any_end": False, "shared": False, "status": status, "reason": None, "created_at": AT,
        "started_at": AT, "finished_at": AT + timedelta(seconds=3.2) if status == "succeeded" else None, "attempt": 1,
        "error": None, "ended": None, "succeeded": None, "failed": None,
    }  # fmt: skip
    return WorkflowStepRecord(**{**values, **other})  # type: ignore[arg-type]


def graphs() -> st.SearchStrategy[After]:
    """Graphs whose parts come after any of those with lower numbers."""

    def of(size: int) -> st.SearchStrategy[After]:
        parts = [st.frozensets(st.integers(0, part - 1), max_size=4) if part else st.just(frozenset()) for part in range(size)]
        return st.tuples(*parts).map(lambda befores: tuple(tuple(sorted(one)) for one in befores))

    return st.integers(1, 24).flatmap(of)


def crossings(after: After) -> int:
    """How many pairs of lines between two neighbouring layers cross, by the places that the layout gave."""
    layout = lay_out(after)
    assert layout is not None
    lines = [(before, part) for part, befores in enumerate(after) for before in befores]
    found = 0
    for (a, b), (c, d) in combinations(lines, 2):
        same = layout.places[a][0] == layout.places[c][0] and layout.places[b][0] == layout.places[d][0]
        found += same and (layout.places[a][1] - layout.places[c][1]) * (layout.places[b][1] - layout.places[d][1]) < 0
    return found


def test_a_part_stands_behind_the_longest_way_to_it() -> None:
    assert layers_of([(), (0,), (1,), (0, 2), ()]) == [0, 1, 2, 3, 0]


def test_lines_that_need_not_cross_do_not() -> None:
    assert crossings(((), (), (), (2,), (1,), (0,))) == 0
    # A part that comes after all of a layer, and one after the first of it.
    assert crossings(((), (), (), (0, 1, 2), (0,))) == 0
    # Two parts after the same two: one crossing is left.
    assert crossings(((), (), (0, 1), (0, 1))) == 1


def test_a_line_that_passes_a_layer_goes_around_its_parts() -> None:
    layout = lay_out(((), (0,), (0, 1)))
    assert layout is not None
    (_, passing, _) = sorted(layout.lines, key=lambda path: path.count("C") * -1)[::-1]
    bent = next(path for path in layout.lines if "H" in path)
    assert passing != bent
    (height,) = {float(found) for found in re.findall(r" (-?[\d.]+)H", bent)}
    top = layout.places[1][1]
    assert not top - 1 < height < top + HEIGHT + 1, "it would cross the box"


@given(after=graphs())
def test_no_part_touches_another_and_all_lines_go_forward(after: After) -> None:
    layout = lay_out(after)
    assert layout is not None
    for (x, y), (other_x, other_y) in combinations(layout.places, 2):
        assert x != other_x or abs(y - other_y) >= HEIGHT + 10
    for part, befores in enumerate(after):
        assert all(layout.places[before][0] + WIDTH < layout.places[part][0] for before in befores)
    assert len(layout.lines) == sum(map(len, after))
    assert all(0 <= x <= layout.width - WIDTH and -0.1 <= y <= layout.height - HEIGHT + 0.1 for x, y in layout.places)


@pytest.mark.parametrize(
    "after",
    [
        (),
        tuple(() for _ in range(MOST_PARTS + 1)),
        tuple(tuple(range(part)) for part in range(60)),
        tuple((0, part - 1) if part > 1 else (0,) if part else () for part in range(100)),
    ],
    ids=["nothing", "too many parts", "too many lines", "too many bends"],
)
def test_what_is_too_large_is_not_laid_out(after: After) -> None:
    assert lay_out(after) is None
    assert lay_out(after[: MOST_PARTS // 10]) is None or sum(map(len, after)) <= MOST_LINES * 5 or not after


def test_a_box_says_what_became_of_its_step() -> None:
    graph = graph_of([
        step(1, []),
        step(2, [1], "in-progress", attempt=2),
        step(3, [1], "running", jobs=200, ended=50, failed=2, succeeded=48),
        step(4, [2, 3], "cancelled", reason="dependency", finished_at=None, started_at=None, attempt=0),
        step(5, [], shared=True, name="a name that is much too long for its box"),
        step(6, [], name="名前" * 20),
    ])  # fmt: skip
    assert graph is not None and not graph.collapsed
    assert [box.line for box in graph.boxes[:5]] == [
        "succeeded, took 3.2 s",
        "in-progress, since 18:26:26 UTC",
        "running, 50 of 200, 2 failed",
        "cancelled (dependency)",
        "succeeded, from the run before",
    ]
    assert graph.boxes[1].label == "step 2, of the type shop: in-progress, since 18:26:26 UTC, attempt 2"
    assert (graph.boxes[2].share, graph.boxes[2].failed, graph.boxes[2].to) == (0.25, 0.01, f"workflows/{UUID(int=3)}")
    assert (graph.boxes[0].share, graph.boxes[0].to) == (None, f"jobs/{UUID(int=1)}")
    assert graph.boxes[4].name == "a name that is much too …" and graph.boxes[5].name == "名前" * 6 + "…"
    assert graph.description == "6 steps: 3 succeeded, 1 in-progress, 1 running, 1 cancelled."


def test_a_large_run_is_drawn_by_its_layers() -> None:
    steps = [step(1, []), *(step(place, [1], "failed" if place == 7 else "queued") for place in range(2, 500)), step(500, [7])]
    graph = graph_of(steps)
    assert graph is not None and graph.collapsed
    assert [(box.name, box.status, box.line) for box in graph.boxes] == [
        ("Layer 1", "succeeded", "1 step, 1 ended"),
        ("Layer 2", "failed", "498 steps, 1 ended"),
        ("Layer 3", "succeeded", "1 step, 1 ended"),
    ]
    assert graph.boxes[1].label == "Layer 2: 498 steps: 497 queued, 1 failed"
    chain = graph_of([step(place, [place - 1] if place > 1 else []) for place in range(1, 10_001)])
    assert chain is not None and len(chain.boxes) == 40
    assert (chain.boxes[0].name, chain.boxes[-1].name) == ("Layers 1 to 250", "Layers 9751 to 10000")
    assert graph_of([]) is None
