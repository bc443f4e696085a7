"""The pools: slots as a map of owners, moves under way, keys with the longest queues, standing jobs."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import InvalidInput, NotFound
from penstock.groups import queries as ownership
from penstock.groups import rebalance
from penstock.http.auth import Role
from penstock.http.dashboard.view import Action, Done, Page, Shown, View, not_here, segment
from penstock.jobs.top import top_keys
from penstock.pools import queries as pools
from penstock.pools import views as pool_views
from penstock.pools.members import workers_of
from penstock.pools.models import PoolDetails, PoolMember
from penstock.postgres.database import Database

_MOST = 100
_MOST_KEYS = 20
_MOST_DRAWN = 1_024
_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class _Pool:
    members: list[PoolMember]
    standing: list[object]
    quarantined: list[object]
    paused: list[object]


@dataclass(frozen=True, slots=True)
class Cell:
    """A slot on the map: its place, the number of its owner from 1 (0: none), and whether it moves."""

    slot: int
    x: int
    y: int
    owner: int
    moves: bool


async def show(view: View) -> Shown:
    """All pools that the user may see."""
    found = [pool for pool in await view.read(pool_views.details) if view.user.may(pool.name)]
    section = view.section(found, lambda pool: pool.name)
    loads = await view.loads([pool.name for pool in section.rows])
    shown = [(pool, loads.get(pool.name)) for pool in section.rows]
    return Shown("Pools", "pools.html", {"pools": shown, "section": section})


async def show_one(view: View) -> Shown:
    """One pool."""
    name = view.parameters["name"]
    pool = await _details(view, name)
    read = await view.read(_look, name)
    keys = await view.read(top_keys, name, _MOST_KEYS, kept_s=5.0, follows=True)
    wanted = view.query.get("key", "")
    state = None
    if wanted:
        state = await view.read(pool_views.key_state, name, wanted)
    masked = view.masking.masks(name)
    return Shown(
        name,
        "pool.html",
        {
            "pool": pool, "members": read.members, "keys": keys, "standing": read.standing, "quarantined": read.quarantined,
            "paused": read.paused, "cells": cells(read.members), "columns": _COLUMNS, "wanted": wanted, "state": state,
            "masked": masked,
        },
    )  # fmt: skip


def cells(members: list[PoolMember]) -> list[Cell]:
    """The map of a pool whose slots are numbers; empty for one with a rule of its own."""
    owners = {member.id: place for place, member in enumerate((one for one in members if one.id is not None), 1)}
    moving = {slot for member in members for slot in (*member.coming, *member.going)}
    found = [
        Cell(slot, slot % _COLUMNS, slot // _COLUMNS, owners.get(member.id, 0), slot in moving)
        for member in members
        for slot in member.slots
        if isinstance(slot, int) and slot < _MOST_DRAWN
    ]
    return sorted(found, key=lambda cell: cell.slot)


async def drain(view: View) -> Done:
    """Move a worker out: it hands its slots to the others."""
    return await _drain(view, drain=True)


async def undrain(view: View) -> Done:
    """Let a drained worker take part again."""
    return await _drain(view, drain=False)


async def _drain(view: View, *, drain: bool) -> Done:
    name, worker = view.parameters["name"], view.text("worker")
    view.require(name)
    async with view.changing("drain in pool" if drain else "undrain in pool", pool=name, worker=worker):
        await rebalance.drain(await view.database(), name, worker, None, drain=drain)
    return Done(f"pools/{segment(name)}", "It hands its slots to the others." if drain else "It takes part again.")


async def change_key(view: View) -> Done:
    """Pause or resume a key, ask the rule about it again, or change its weight."""
    name, key, action = view.parameters["name"], view.raw_text("key") or "", view.text("action")
    view.require(name)
    database = await view.database()
    said = {
        "pause": "The key is paused.",
        "resume": "The key goes on.",
        "release": "The rule is asked again.",
        "weight": "Changed.",
    }
    if action not in said or not key:
        raise InvalidInput("no key, or an unknown action", hint=f"There are: {', '.join(said)}.")
    async with view.changing(f"{action} key", pool=name, key=key):
        if action == "pause":
            await pools.pause_key(database, name, key)
        elif action == "resume":
            await pools.resume_key(database, name, key)
        elif action == "release":
            await ownership.release_keys(database, name, key)
        else:
            await pools.set_weight(database, name, key, view.number("weight") or 1)
    return Done(f"pools/{segment(name)}?key={segment(key)}", said[action])


async def standing(view: View) -> Done:
    """Start or stop a standing job."""
    name, key, action = view.parameters["name"], view.raw_text("key") or "", view.text("action")
    view.require(name)
    if action not in ("start", "stop") or not key:
        raise InvalidInput("no key, or an unknown action", hint="There are start and stop.")
    pool = await view.app.find_pool(name)
    async with view.changing(f"{action} standing job", pool=name, key=key):
        if action == "stop":
            await pool.stop(key)
        else:
            await pool.start(key)
    return Done(f"pools/{segment(name)}", "Stopped." if action == "stop" else "Started.")


async def _details(view: View, name: str) -> PoolDetails:
    found = [pool for pool in await view.read(pool_views.details) if pool.name == name and view.user.may(name)]
    if not found:
        raise not_here(f"pool {name}")
    return found[0]


async def _look(database: Database, name: str) -> _Pool:
    try:
        return _Pool(
            await workers_of(database, name),
            list(await pool_views.standing_jobs(database, name, limit=_MOST, read=str)),
            list(await pool_views.quarantined_keys(database, name, limit=_MOST)),
            list(await pool_views.paused_keys(database, name, limit=_MOST)),
        )
    except NotFound:
        return _Pool([], [], [], [])


PAGES = [Page("pools", show), Page("pools/{name}", show_one)]
ACTIONS = [
    Action("pools/{name}/drain", drain),
    Action("pools/{name}/undrain", undrain),
    Action("pools/{name}/key", change_key),
    Action("pools/{name}/standing", standing, Role.ENQUEUE),
]
