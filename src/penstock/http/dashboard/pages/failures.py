"""Failures by cause: the jobs that failed, by the signature that their last error got when it was settled.

A group is replayed by an operation on all jobs of its signature, which Operations shows before it starts. One that is known can
be muted: then the overview does not count it among what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.core.signatures import compiled_in_slices, normalised
from penstock.errors import InvalidInput
from penstock.http.auth import Role
from penstock.http.dashboard import queries
from penstock.http.dashboard.queries import FailureGroup
from penstock.http.dashboard.view import Action, Done, Page, Shown, View, segment
from penstock.jobs import type_queries

_MOST_GROUPS = 100


async def show(view: View) -> Shown:
    """The failures that are kept, by cause, as far as was looked."""
    name = view.query.get("type", "").strip() or None
    await compiled_in_slices()
    groups = [_shown(view, group) for group in await _groups(view, name)]
    muted = await view.read(queries.muted_failures, kept_s=5.0)
    mutes = {(group.name, group.signature): muted.get((group.name, group.signature)) for group in groups}
    groups.sort(key=lambda group: mutes[group.name, group.signature] is not None)
    types = [one.name for one in await view.read(type_queries.job_types) if view.user.may(one.name)]
    return Shown(
        "Failures",
        "failures.html",
        {
            "groups": groups,
            "mutes": mutes,
            "looked": groups[0].looked if groups else 0,
            "until": groups[0].until if groups else None,
            "whole": len(groups) < _MOST_GROUPS,
            "name": name,
            "types": types,
        },
    )


async def mute(view: View) -> Done:
    """Count the failures of a group no longer among what is wrong."""
    name, signature = _named(view)
    async with view.changing("mute failures", type=name, signature=signature) as changed:
        changed(int(await queries.mute_failures(await view.database(), name, signature, view.user.name)))
    return Done(_back(view), f"Muted: the overview does not count these failures of {name}.")


async def unmute(view: View) -> Done:
    """Take a mute back."""
    name, signature = _named(view)
    async with view.changing("unmute failures", type=name, signature=signature) as changed:
        changed(int(await queries.unmute_failures(await view.database(), name, signature)))
    return Done(_back(view), f"The overview counts these failures of {name} again.")


def _named(view: View) -> tuple[str, str]:
    """Job type and signature of the group of a form. Raises `InvalidInput`, `ApiError` 404."""
    name, signature = view.text("type"), view.text("signature")
    if not name or not signature:
        raise InvalidInput("failures have a type and a signature", hint="Take them from the page.")
    view.require(name)
    return name, signature


def _back(view: View) -> str:
    return f"failures?type={segment(view.text('only'))}" if view.text("only") else "failures"


def _shown(view: View, group: FailureGroup) -> FailureGroup:
    """A group as the user may see it, the message with signs for what varies."""
    message = view.masking.text(group.name, normalised(group.message or ""))
    return replace(group, type=view.masking.text(group.name, group.type or "Error"), message=message)


async def _groups(view: View, name: str | None) -> Sequence[FailureGroup]:
    if name is not None:
        view.require(name)
        names: tuple[str, ...] | None = (name,)
    else:
        names = view.names
    return await view.read(queries.failure_groups, names, None, _MOST_GROUPS, kept_s=5.0, follows=True)


PAGES = [Page("failures", show)]
ACTIONS = [Action("failures/mute", mute, Role.ENQUEUE), Action("failures/unmute", unmute, Role.ENQUEUE)]
