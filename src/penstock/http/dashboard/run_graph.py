"""The run of a workflow as a graph: what stands in each box, and what is drawn of a run that is too large.

A run of up to 300 steps has a box for each. A larger one has a box for each layer, or for several layers together, with the
numbers of its steps by status. No input or output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from unicodedata import east_asian_width

from penstock.http.dashboard.graph_layout import Layout, lay_out, layers_of
from penstock.http.dashboard.rendering import number, span
from penstock.workflows.models import WorkflowStepRecord

_NAME = 25
_LINE = 31
_MOST_BANDS = 40
_WORST_FIRST = ("failed", "expired", "cancelled", "in-progress", "running", "queued", "waiting", "unknown")


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the graph.

    Attributes:
        key: What tells it from others.
        name: Name of the step, as much as has room.
        status: Status of the step, or the worst one of its steps.
        line: Status and times in a line, as much as has room.
        label: All of it in words, for screen readers and as a tooltip.
        to: Path of the page of the job or job group, relative to the dashboard; None: it leads nowhere.
        share: Which part of its jobs has ended, from 0 to 1; None: it is one job.
        failed: Which part has failed.
        x: Left.
        y: Top.
    """

    key: str
    name: str
    status: str
    line: str
    label: str
    to: str | None
    share: float | None
    failed: float
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class RunGraph:
    """A run as a graph.

    Attributes:
        boxes: Its boxes.
        layout: The lines between them, and the size of the whole.
        description: The whole in a sentence.
        collapsed: Whether a box stands for the steps of one or several layers.
    """

    boxes: list[Box]
    layout: Layout
    description: str
    collapsed: bool


def graph_of(steps: Sequence[WorkflowStepRecord]) -> RunGraph | None:
    """The graph of a run, of all of its steps in order; None: it has none."""
    if not steps:
        return None
    after = tuple(tuple(place - 1 for place in step.after) for step in steps)
    layout = lay_out(after)
    if layout is None:
        return _collapsed(steps, layers_of(after))
    boxes = [_box(step, *place) for step, place in zip(steps, layout.places, strict=True)]
    return RunGraph(boxes, layout, f"{_counted(len(steps), 'step')}: {_by_status(steps)}.", collapsed=False)


def jobs_page(step: WorkflowStepRecord) -> str:
    """The page of the job of a step, or of its job group."""
    return f"{'jobs' if step.jobs is None else 'workflows'}/{step.job}"


def took_of(step: WorkflowStepRecord) -> float | None:
    """How many seconds a step took, from the start of its last attempt; None: it has not ended."""
    began = step.started_at or step.created_at
    return None if step.finished_at is None or began is None else max((step.finished_at - began).total_seconds(), 0.0)


def _box(step: WorkflowStepRecord, x: float, y: float) -> Box:
    words = [step.status if step.reason is None else f"{step.status} ({step.reason})"]
    # The line has no room for all.
    line = list(words)
    share, failed = None, 0.0
    if step.jobs is not None:
        ended, bad = step.ended or 0, step.failed or 0
        share, failed = _part(ended, step.jobs), _part(bad, step.jobs)
        of = f"{number(ended)} of {number(step.jobs)}"
        some = [f"{number(bad)} failed"] if bad else []
        words += [f"{of} jobs", *some]
        line += [of, *some]
    times = _times(step)
    words += times
    if share is None:
        line += times
    if step.attempt > 1:
        words.append(f"attempt {step.attempt}")
    label = f"{step.name}, of the type {step.type}: {', '.join(words)}"
    name, text = _cut(step.name, _NAME), _cut(", ".join(line), _LINE)
    return Box(str(step.place), name, step.status, text, label, jobs_page(step), share, failed, x, y)


def _times(step: WorkflowStepRecord) -> list[str]:
    if step.shared:
        return ["from the run before"]
    if (took := took_of(step)) is not None:
        return [f"took {span(took)}"]
    return [] if step.started_at is None else [f"since {_time(step.started_at)}"]


def _collapsed(steps: Sequence[WorkflowStepRecord], layers: Sequence[int]) -> RunGraph:
    """A box for each layer, or for several that follow each other."""
    together = -(-(max(layers) + 1) // _MOST_BANDS)
    bands: list[list[WorkflowStepRecord]] = [[] for _ in range(max(layers) // together + 1)]
    for step, layer in zip(steps, layers, strict=True):
        bands[layer // together].append(step)
    layout = lay_out(tuple((band - 1,) if band else () for band in range(len(bands))))
    assert layout is not None  # noqa: S101 - there are at most 40
    boxes = []
    for band, (own, (x, y)) in enumerate(zip(bands, layout.places, strict=True)):
        first, last = band * together + 1, min((band + 1) * together, max(layers) + 1)
        name = f"Layer {first}" if first == last else f"Layers {first} to {last}"
        found = {step.status for step in own}
        status = next((one for one in _WORST_FIRST if one in found), "succeeded")
        ended = sum(step.status in ("succeeded", "failed", "expired", "cancelled") for step in own)
        bad = sum(step.status in ("failed", "expired") for step in own)
        many = _counted(len(own), "step")
        line = _cut(f"{many}, {number(ended)} ended", _LINE)
        parts = _part(ended, len(own)), _part(bad, len(own))
        boxes.append(Box(f"layer-{band}", name, status, line, f"{name}: {many}: {_by_status(own)}", None, *parts, x, y))
    description = f"{_counted(len(steps), 'step')} in {_counted(max(layers) + 1, 'layer')}: {_by_status(steps)}."
    return RunGraph(boxes, layout, description, collapsed=True)


def _by_status(steps: Sequence[WorkflowStepRecord]) -> str:
    return ", ".join(f"{number(many)} {status}" for status, many in Counter(step.status for step in steps).most_common())


def _counted(many: int, what: str) -> str:
    return f"{number(many)} {what}{'' if many == 1 else 's'}"


def _part(some: int, all: int) -> float:
    return min(some / all, 1.0) if all else 0.0


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%H:%M:%S UTC")


def _cut(text: str, room: int) -> str:
    """As much of a text as has room; wide characters, as of Chinese, count twice."""
    widths = [2 if east_asian_width(sign) in "WF" else 1 for sign in text]
    if sum(widths) <= room:
        return text
    used = 0
    for place, width in enumerate(widths):
        used += width
        if used > room - 1:
            return f"{text[:place]}…"
    return text
