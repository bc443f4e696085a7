"""`penstock erase`: removes all that belongs to a key or to a value of a field, and does what is left of erasures."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from penstock.app import Penstock
from penstock.cli.backend import Backend, server_url, with_backend, with_database
from penstock.cli.operations import print_operation
from penstock.cli.output import AsJson, out, print_json, print_table, say
from penstock.errors import InvalidInput
from penstock.operations.models import Erasure, ErasurePreview, OperationRecord

_LONGEST_WAIT = timedelta(days=1)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(erase)


def erase(
    key: Annotated[str | None, typer.Option(help="Key of jobs, events and standing jobs.")] = None,
    field: Annotated[
        str | None, typer.Option(metavar="FIELD=VALUE", help="Field of payloads and its value: customer.id=acme.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Id of one job.")] = None,
    rewrite: Annotated[
        bool,
        typer.Option("--rewrite", help="Rewrite tables at the end, each locked meanwhile, so that no byte stays in their files."),
    ] = False,
    skip_unseen: Annotated[
        bool, typer.Option("--skip-unseen", help="Leave payloads whose fields cannot be seen: encrypted ones, and bytes.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would be removed, and change nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end of the operation.")] = False,
    finish: Annotated[
        bool, typer.Option("--finish", help="Do what erasures wait for: lakes that this process reaches, and the vacuum.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all that belongs to a key, or to a value of a field of payloads, in an operation."""
    if finish:
        if (key, field, job) != (None, None, None):
            raise InvalidInput("--finish takes no key and no field", hint="It finishes all erasures that wait.")
        jobs, ended = with_database(_finish)
        say({"lake_jobs": jobs, "ended": ended}, f"{jobs} jobs erased from lakes, {len(ended)} erasures ended", as_json)
        return
    name, separator, value = (field or "").partition("=")
    if field is not None and not separator:
        raise InvalidInput(f"{field!r} has no value", hint="For example: --field customer.id=acme")
    erasure = Erasure(key, name or None, value if separator else None, job, rewrite, skip_unseen)

    async def run(backend: Backend) -> OperationRecord | ErasurePreview:
        if dry_run:
            return await backend.operations.preview_erasure(erasure)
        started = await backend.operations.erase(erasure)
        return await backend.operations.wait(started.id, timeout=_LONGEST_WAIT) if wait else started

    found = with_backend(run)
    if as_json:
        print_json(found)
    elif isinstance(found, ErasurePreview):
        rows = {
            "jobs that wait or run": found.queued,
            "finished jobs": found.archived,
            "events": found.events,
            "messages": found.messages,
            "standing jobs": found.standing,
            "cannot be seen": found.unseen,
        }
        print_table(["would be erased", ""], list(rows.items()), empty="")
    else:
        print_operation(found)
        if not found.ended and server_url() is None:
            out.print("Workers do it. What is in lakes: penstock erase --finish", highlight=False)


async def _finish(app: Penstock) -> tuple[int, list[str]]:
    from penstock.operations import queries
    from penstock.operations.vacuuming import vacuum_erased

    database = await app.database()
    jobs = 0
    if await queries.erasures(database, "lake"):
        from penstock.history.erasing import erase_from_lakes

        jobs = await erase_from_lakes(database)
        while await queries.erasures(database, "lake") and await queries.advance(database) is not None:
            pass
    ended = []
    while (operation := await vacuum_erased(database)) is not None:
        ended.append(str(operation.id))
    return jobs, ended
