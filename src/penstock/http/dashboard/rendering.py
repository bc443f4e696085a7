"""Templates: the environment of Jinja2 with the few filters that the pages share.

Everything is escaped. A template makes no decision about access: what it gets is what the user may see.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_eval_context
from jinja2.nodes import EvalContext
from markupsafe import Markup, escape

from penstock._version import __version__
from penstock.http.dashboard.view import segment


@cache
def environment() -> Environment:
    """The environment of all templates."""
    made = Environment(
        loader=PackageLoader("penstock.http.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {"number": number, "span": span, "at": at, "json": pretty_json, "segment": segment, "share": share}
    made.globals |= {"version": __version__, "sparkline": sparkline, "bars": bars, "lines": lines, "share": share}
    return made


def number(value: float | None) -> str:
    """A number with its digits in groups; a dash for none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:,.2f}".rstrip("0").rstrip(".")


def span(value: float | timedelta | None) -> str:
    """A time span in its two largest units; a dash for none."""
    if value is None:
        return "–"
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if rest >= size and len(parts) < 2:
            parts.append(f"{rest // size} {unit}")
            rest %= size
        elif parts:
            break
    return " ".join(parts)


def share(part: float, whole: float) -> str:
    """A share in percent."""
    return "–" if not whole else f"{100 * part / whole:.0f} %"


@pass_eval_context
def at(_: EvalContext, value: datetime | None) -> Markup:
    """A time, in UTC; the browser shows how long ago that is."""
    if value is None:
        return Markup("–")
    try:
        moment = value.astimezone(UTC)
    except OverflowError:  # too near to the beginning or the end of time for a time zone
        return escape(value.isoformat(" "))
    return Markup('<time datetime="{}">{}</time>').format(
        moment.isoformat(timespec="milliseconds"), moment.strftime("%Y-%m-%d %H:%M:%S UTC")
    )


def pretty_json(value: Any) -> str:
    """A document with indentation; in one line where it is nested too deeply, or has numbers beyond 64 bits."""
    with suppress(TypeError):
        return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
    with suppress(RecursionError):
        return json.dumps(value, ensure_ascii=False, default=str)
    return "…"


def sparkline(values: Sequence[float], title: str, *, width: int = 120, height: int = 24) -> Markup:
    """A line of numbers as SVG, with its meaning for screen readers."""
    most = max([*values, 1e-9])
    step = width / max(len(values) - 1, 1)
    points = " ".join(f"{place * step:.1f},{height - 1 - (height - 2) * value / most:.1f}" for place, value in enumerate(values))
    return Markup(
        '<svg class="spark" role="img" width="{}" height="{}" viewBox="0 0 {} {}" aria-label="{}"><title>{}</title>'
        '<polyline points="{}" /></svg>'
    ).format(width, height, width, height, title, title, points)


def bars(parts: Sequence[tuple[float, float]], title: str, *, width: int = 360, height: int = 72) -> Markup:
    """A bar for each pair of numbers, the second part of which is on top and bad, as SVG with its meaning for screen readers."""
    most = max([*(good + bad for good, bad in parts), 1e-9])
    step = width / max(len(parts), 1)
    drawn = []
    for place, (good, bad) in enumerate(parts):
        low, high = (height - 1) * good / most, (height - 1) * bad / most
        for kind, top, size in (("good", height - low, low), ("bad", height - low - high, high)):
            if size:
                drawn.append(
                    Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" />').format(
                        kind, place * step, top, max(step - 1, 1), size
                    )
                )
    return _chart("bars", Markup("").join(drawn), title, width, height)


def lines(series: Sequence[Sequence[float]], title: str, *, width: int = 360, height: int = 72) -> Markup:
    """Several lines of numbers over one scale as SVG, with their meaning for screen readers."""
    most = max([*(value for values in series for value in values), 1e-9])
    drawn = []
    for place, values in enumerate(series):
        step = width / max(len(values) - 1, 1)
        points = " ".join(f"{x * step:.1f},{height - 1 - (height - 2) * value / most:.1f}" for x, value in enumerate(values))
        drawn.append(Markup('<polyline class="line{}" points="{}" />').format(place + 1, points))
    return _chart("lines", Markup("").join(drawn), title, width, height)


def _chart(kind: str, drawn: Markup, title: str, width: int, height: int) -> Markup:
    return Markup(
        '<svg class="chart {}" role="img" viewBox="0 0 {} {}" preserveAspectRatio="none" aria-label="{}"><title>{}</title>'
        "{}</svg>"
    ).format(kind, width, height, title, title, drawn)


def render(template: str, **values: Any) -> str:
    """A template as text."""
    return environment().get_template(template).render(**values)


__all__ = ["environment", "escape", "render"]
