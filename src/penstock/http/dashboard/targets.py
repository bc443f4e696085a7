"""Which page, action or file answers a path of the dashboard."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.routing import compile_path

from penstock.http.dashboard.pages import ACTIONS, PAGES
from penstock.http.dashboard.view import Action, Page
from penstock.http.paths import plain


@dataclass(frozen=True, slots=True)
class Target:
    """What answers a path."""

    pattern: re.Pattern[str]
    template: str
    page: Page | None = None
    action: Action | None = None


def _target(path: str, page: Page | None = None, action: Action | None = None) -> Target:
    return Target(compile_path(f"/{path}")[0], f"/{path}", page, action)


TARGETS = [
    *(_target(name) for name in ("login", "logout", "live", "static/{file}")),
    *(_target(page.path, page=page) for page in PAGES),
    *(_target(action.path, action=action) for action in ACTIONS),
]


def find(path: str, *, posted: bool = False) -> tuple[Target | None, dict[str, str]]:
    """What answers a path, and its parameters; None: nothing does.

    Args:
        path: Path relative to the dashboard, with a slash before it.
        posted: Whether an action is meant where there is a page and an action.
    """
    found = [
        (target, {name: plain(value) for name, value in match.groupdict().items()})
        for target in TARGETS
        if "\n" not in path and (match := target.pattern.match(path)) is not None
    ]
    return next((one for one in found if (one[0].action is not None) is posted), found[0] if found else (None, {}))
