"""Which access a call needs that the database refused, for the hint of the error.

The accesses and their functions are in one place, the SQL of `functions_of`, which this module reads when an error needs it.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

ACCESSES = ("reader", "producer", "worker", "server", "admin")
_ADDED = {"reading": "reader", "producing": "producer", "working": "worker", "serving": "server", "managing": "admin"}
_part = ""


def takes_part_as(access: str) -> None:
    """Note what this process is, a worker or a server: it needs this access whatever call is refused first."""
    global _part
    _part = access


def hint_for(refusal: str) -> str:
    """What to do about a refusal of PostgreSQL.

    Args:
        refusal: Its message, in any language; it names the function, table or schema.
    """
    named = [access for word in re.findall(r"\w+", refusal) if (access := accesses().get(word)) is not None]
    if not named and re.search(r"\bfunction\b", refusal):
        return "The owner of the schema alone may call it."
    needed = max([*named, *([_part] if _part else [])], key=ACCESSES.index, default="")
    if needed:
        return f"Let the schema's owner run: select penstock.grant_access('<role>', '{needed}');"
    return (
        "Let the schema's owner run: select penstock.grant_access('<role>', '<access>'); "
        "the access is reader, producer (to enqueue), worker, server (for penstock server) or admin."
    )


@cache
def accesses() -> dict[str, str]:
    """The least access that may call it, for each function that roles may call."""
    source = resources.files("penstock.postgres").joinpath("schema/functions/core/access.sql").read_text("utf-8")
    found: dict[str, str] = {}
    for list_name, names in re.findall(r"(\w+) constant text\[\] := array\[(.*?)\];", source, re.DOTALL):
        if list_name in _ADDED:
            found |= {name: _least(_ADDED[list_name], found.get(name)) for name in re.findall(r"'(\w+)'", names)}
    found["declare_job_type"] = "worker"
    return found


def _least(access: str, known: str | None) -> str:
    return access if known is None else min(access, known, key=ACCESSES.index)
