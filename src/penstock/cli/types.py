"""Commands about job types: types, pause, resume, stats, prune, grant, revoke."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from penstock.app import Penstock
from penstock.cli.backend import Backend, with_backend, with_database
from penstock.cli.enqueueing import parse_json
from penstock.cli.output import AsJson, cell, out, pass_on_json, print_json, print_table, say
from penstock.cli.times import span
from penstock.errors import NotFound
from penstock.jobs.records import HandlerRecord, JobTypeRecord

Name = Annotated[str, typer.Argument(help="Job type.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    types = typer.Typer(help="Job types: list, create, change, drop.", invoke_without_command=True)
    types.callback()(list_types)
    types.command("list")(list_types)
    types.command("show")(show)
    types.command("create")(create)
    types.command("change")(change)
    types.command("drop")(drop)
    app.add_typer(types, name="types")
    app.command()(pause)
    app.command()(resume)
    app.command()(stats)
    app.command()(prune)
    app.command()(grant)
    app.command()(revoke)


def list_types(context: typer.Context, as_json: AsJson = False) -> None:
    """Job types: list, create, change, drop."""
    if pass_on_json(context, as_json):
        return
    types = with_backend(lambda app: app.job_types())
    if as_json:
        print_json([_shown(record) for record in types])
        return
    print_table(
        ["name", "delivery", "max attempts", "concurrency", "visibility timeout", "rate limit", "paused since"],
        [
            (
                t.name,
                t.delivery_strategy,
                t.max_attempts,
                t.concurrency,
                t.visibility_timeout,
                f"{t.rate_limit} in {t.rate_period}" if t.rate_limit else None,
                t.paused_at,
            )
            for t in types
        ],
        empty="no job types yet",
    )


def show(name: Annotated[str, typer.Argument(help="Job type, pool, subscriber, consumer group (STREAM/GROUP) or schedule.")],
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show what workers say of a handler: schema of its payloads, documentation, owner; and the options of a job type."""

    async def find(app: Backend) -> tuple[list[HandlerRecord], JobTypeRecord | None]:
        types = {record.name: record for record in await app.job_types()}
        return [record for record in await app.handlers() if record.name == name], types.get(name)

    handlers, record = with_backend(find)
    if record is None and not handlers:
        raise NotFound(f"no such job type or handler: {name}", hint="List the types that exist: penstock types")
    if as_json:
        print_json({"name": name, "type": None if record is None else _shown(record), "handlers": handlers})
        return
    if record is not None:
        options = [field.name for field in fields(record.options) if field.name not in ("docs_url", "owner")]
        print_table(["option", "value"], [(option, getattr(record.options, option)) for option in options], empty="")
    for each in handlers:
        out.print(f"{each.kind}, begun with at {cell(each.noted_at)}", highlight=False)
        out.print(
            f"documentation: {each.docs_url or '-'}\nowner: {each.owner or '-'}", highlight=False, markup=False, soft_wrap=True
        )
        print_json(each.schema)
    if not handlers:
        out.print("no worker has said anything of its handler")


Option = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="max_attempts=3, concurrency=10, ...; may be repeated."),
]


def create(name: Name, options: Option = None, as_json: AsJson = False) -> None:
    """Create a job type."""
    created = with_backend(lambda app: app.create_job_type(name, **parse_options(options)))
    say(_shown(created), f"created: {created.name}", as_json)


def change(name: Name, options: Option = None, as_json: AsJson = False) -> None:
    """Change options of a job type; takes effect at once."""
    changed = with_backend(lambda app: app.change_job_type(name, **parse_options(options)))
    say(_shown(changed), f"changed: {name}", as_json)


def drop(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option(help="Also while jobs wait; they are archived as cancelled.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop a job type. What is archived of its jobs stays."""
    if not yes:
        typer.confirm(f"Drop job type {name}?", abort=True)
    with_backend(lambda app: app.drop_job_type(name, force=force))
    say({"name": name, "dropped": True}, f"dropped: {name}", as_json)


def _shown(record: JobTypeRecord) -> dict[str, Any]:
    """A job type as `--json` prints it: with its options as an application declares them."""
    shown = ("name", "options", "paused_at", "created_at", "updated_at")
    return {field: getattr(record, field) for field in shown}


def pause(name: Name, as_json: AsJson = False) -> None:
    """Start no more jobs of a type; running ones go on."""
    with_backend(lambda app: app.pause(name))
    say({"name": name, "paused": True}, f"paused: {name}", as_json)


def resume(name: Name, as_json: AsJson = False) -> None:
    """End a pause."""
    with_backend(lambda app: app.resume(name))
    say({"name": name, "paused": False}, f"resumed: {name}", as_json)


def stats(as_json: AsJson = False) -> None:
    """How each job type is doing: waiting, running, finished in the last hour."""
    counts = with_backend(lambda app: app.counts())
    if as_json:
        print_json(counts)
        return
    columns = "name paused ready deferred in-progress oldest,s succeeded/h failed/h expired/h cancelled/h quarantined/h"
    print_table(
        columns.split(),
        [
            (
                c.name, c.paused, c.ready, c.deferred, c.in_progress, c.oldest_ready_s,
                c.succeeded_last_hour, c.failed_last_hour, c.expired_last_hour, c.cancelled_last_hour,
                c.quarantined_last_hour,
            )
            for c in counts
        ],
        empty="no job types yet",
    )  # fmt: skip


def prune(
    keep: Annotated[str, typer.Option(help="How long finished jobs are kept whose type does not say it: 30d, 12h.")] = "30d",
    as_json: AsJson = False,
) -> None:
    """Drop the parts of the archive whose jobs have been kept for long enough. Their ids can then be used again.

    Also deletes what came back from lakes and is older than the setting keep_history.
    """
    dropped = with_database(lambda app: app.prune(span(keep)))
    if as_json:
        print_json(dropped)
    else:
        print_table(["partition", "jobs"], list(dropped.items()), empty="nothing to drop")


def grant(
    role: Annotated[str, typer.Argument(help="A database role that exists.")],
    access: Annotated[str, typer.Argument(help="reader, producer, worker, server or admin.")],
    as_json: AsJson = False,
) -> None:
    """Let a database role read, enqueue, work, serve HTTP, or do everything; it replaces the access that the role had."""

    async def run(app: Penstock) -> None:
        await (await app.database()).fetch("select penstock.grant_access($1::name, $2)", role, access)

    with_database(run)
    say({"role": role, "access": access}, f"granted: {role} is {access}", as_json)


def revoke(role: Annotated[str, typer.Argument(help="A database role that has access.")], as_json: AsJson = False) -> None:
    """Take all access from a database role."""

    async def run(app: Penstock) -> None:
        await (await app.database()).fetch("select penstock.revoke_access($1::name)", role)

    with_database(run)
    say({"role": role, "access": None}, f"revoked: {role} has no access", as_json)


def parse_options(given: list[str] | None) -> dict[str, Any]:
    """Options given as NAME=VALUE."""
    options: dict[str, Any] = {}
    for pair in given or []:
        name, separator, value = pair.partition("=")
        if not separator:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE")
        try:
            options[name.replace("-", "_")] = parse_json(value, name)
        except Exception:
            options[name.replace("-", "_")] = value
    return options
