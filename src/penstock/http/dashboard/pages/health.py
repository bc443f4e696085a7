"""Health: what `penstock doctor` finds."""

from __future__ import annotations

from penstock.http.dashboard.view import Page, Shown, View
from penstock.worker.doctor import examine
from penstock.worker.findings import worst

_KEPT_S = 30.0
_RANK = {"problem": 0, "warning": 1, "ok": 2}


async def show(view: View) -> Shown:
    """The findings, worst first."""
    # The examination writes a notification and waits for it, and so goes through the connections of the application.
    found = await view.read(examine, kept_s=_KEPT_S, plain=True)
    order = sorted(found, key=lambda finding: _RANK[finding.level])
    return Shown("Health", "health.html", {"findings": order, "worst": worst(found)})


PAGES = [Page("health", show, all_types=True)]
