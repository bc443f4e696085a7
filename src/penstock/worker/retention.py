"""Retention: how long finished jobs, messages and history are kept whose type does not say it.

It is stored in the database, so that a worker prunes by it without the right to say when: a role with the access worker can have
nothing deleted sooner. A setting that was given is stored by the process that starts with it: as it is by a role that may do
everything (the owner of the schema, the access admin), and by others only if it is longer.
"""

from __future__ import annotations

from datetime import timedelta

from penstock.core.logs import get_logger
from penstock.jobs import worker_queries
from penstock.postgres.database import Database
from penstock.settings import Settings, longest_kept

log = get_logger("penstock.maintenance")
_SETTINGS = {"jobs": "keep", "history": "keep_history"}


async def store(database: Database, settings: Settings) -> None:
    """Store the retention that the settings were given, as far as the role may; a warning names what stays longer."""
    wanted: dict[str, timedelta | None] = {"jobs": longest_kept(settings.keep), "history": settings.keep_history}
    wanted = {kind: keep for kind, keep in wanted.items() if _SETTINGS[kind] in settings.model_fields_set}
    if not wanted:
        return
    may_change = await worker_queries.may_change_retention(database)
    put = worker_queries.change_retention if may_change else worker_queries.lengthen_retention
    for kind, keep in wanted.items():
        if await put(database, kind, keep):
            log.info("retention_changed", kind=kind, keep=_shown(keep))
    if may_change:
        return
    stored = await worker_queries.stored_retention(database)
    for kind, keep in wanted.items():
        if stored.get(kind) != keep:
            log.warning(
                "retention_is_longer",
                kind=kind,
                setting=_shown(keep),
                stored=_shown(stored.get(kind)),
                hint="This role may not shorten it. With the access admin: "
                f"select penstock.change_retention('{kind}', '{keep}');",
            )


def _shown(keep: timedelta | None) -> str:
    return "for ever" if keep is None else str(keep)
