"""The command that enqueues: one job, or a file of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, Annotated, Any
from uuid import UUID

import orjson
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.cli.backend import Backend, group_named, with_backend
from penstock.cli.output import AsJson, err, out, print_json, say
from penstock.cli.times import TIME, moment, moment_in_file, span, span_in_file
from penstock.errors import InvalidInput
from penstock.jobs.models import Enqueued, NewJob, When, the_only

_BATCH = 5_000
_FIELDS = {field.name for field in fields(NewJob)}
_PARSED = {"run_after": moment_in_file, "expires_at": moment_in_file, "time_limit": span_in_file, "unique_for": span_in_file}


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(enqueue)


def enqueue(
    name: Annotated[str, typer.Argument(help="Job type.")],
    data: Annotated[str | None, typer.Argument(help="Payload, JSON.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help='NDJSON, a job a line: {"data": ...}; - for standard input.')
    ] = None,
    id: Annotated[str | None, typer.Option(help="Identity; the same id again is the same job.")] = None,
    key: Annotated[str | None, typer.Option(help="Whose job it is.")] = None,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Lower first.")] = 0,
    run_after: Annotated[str | None, typer.Option(help=TIME)] = None,
    expires_at: Annotated[str | None, typer.Option(help=TIME)] = None,
    unique: Annotated[str | None, typer.Option(help="Coalescing key.")] = None,
    unique_for: Annotated[str | None, typer.Option(help="Hold it for this time also when the job has ended, such as 1h.")] = None,
    max_attempts: Annotated[int | None, typer.Option(min=1, max=32_767, help="Instead of that of the job type.")] = None,
    time_limit: Annotated[str | None, typer.Option(help="Instead of that of the job type, such as 90s.")] = None,
    after: Annotated[list[str] | None, typer.Option(help="Id of a job for which it waits; again for each further one.")] = None,
    when: Annotated[When | None, typer.Option(help="finished: however those jobs end; succeeded: or it is cancelled.")] = None,
    group: Annotated[str | None, typer.Option(help="Job group of which it is a child, by name or id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Enqueue a job, or many from a file.

    A line of a file is an object with data and the options below, each optional, as in {"data": 1, "run_after": "+5m"}; the
    options that are given here are for the lines that do not say otherwise. A time in a file has its zone: 2026-01-31T12:00:00Z.
    """
    job = NewJob(
        parse_json(data, "the payload") if data is not None else {},
        id,
        key,
        priority,
        moment(run_after) if run_after else None,
        moment(expires_at) if expires_at else None,
        unique,
        max_attempts,
        None if time_limit is None else span(time_limit),
        None if unique_for is None else span(unique_for),
        after or None,
        when,
    )
    if file is not None:
        if data is not None:
            raise InvalidInput("give a payload or a file, not both")
        if id is not None:
            raise InvalidInput("jobs of a file cannot all have one id", hint="Put an id into each line.")
        with_backend(lambda app: _from_file(app, name, file, job, group, as_json))
        return

    async def one(app: Backend) -> Enqueued:
        return the_only(await app.enqueue_many(name, [await _in_group(app, job, group)]))

    receipt = with_backend(one)
    say(receipt, f"{receipt.outcome}: {receipt.id}", as_json)


def parse_json(text: str | bytes, what: str) -> Any:
    """Parse JSON. Raises `InvalidInput`."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{what} is not JSON: {error}", hint='For example: {"shipmentId": "shp_123"}') from None


async def _in_group(app: Backend, job: NewJob, group: str | None) -> NewJob:
    return job if group is None else replace(job, group=await group_named(app, group))


async def _from_file(app: Backend, name: str, file: Path, defaults: NewJob, group: str | None, as_json: bool) -> None:
    defaults = await _in_group(app, defaults, group)
    counted: Counter[str] = Counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    source: IO[bytes]
    if str(file) == "-":
        source, size = sys.stdin.buffer, None
    else:
        try:
            source, size = file.open("rb"), file.stat().st_size
        except OSError as error:
            raise InvalidInput(f"cannot read {file}: {error.strerror}") from None
    with source, Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("bytes", total=size)
        for batch, read in _batches(source, defaults):
            for receipt in await app.enqueue_many(name, batch):
                counted[str(receipt.outcome)] += 1
            progress.update(task, completed=read)
    if as_json:
        print_json(counted)
    else:
        out.print(", ".join(f"{count:,} {outcome}" for outcome, count in counted.items()) or "no jobs in the file")


def _batches(source: IO[bytes], defaults: NewJob) -> Iterator[tuple[list[NewJob], int]]:
    batch: list[NewJob] = []
    read = 0
    for number, line in enumerate(source, 1):
        read += len(line)
        if line.strip():
            batch.append(_job(line, number, defaults))
        if len(batch) == _BATCH:
            yield batch, read
            batch = []
    if batch:
        yield batch, read


def _job(line: bytes, number: int, defaults: NewJob) -> NewJob:
    said = parse_json(line, f"line {number}")
    if not isinstance(said, dict) or (unknown := sorted(set(said) - _FIELDS)):
        found = f"the field {unknown[0]!r}" if isinstance(said, dict) else type(said).__name__
        raise InvalidInput(
            f"line {number} has {found}",
            hint=f"A line is an object with {', '.join(sorted(_FIELDS))}. Lines before it are enqueued in batches of {_BATCH:,}.",
        )
    for name, parse in _PARSED.items():
        if said.get(name) is not None:
            said[name] = parse(f"line {number}: {name}", str(said[name]))
    if said.get("group") is not None:
        try:
            said["group"] = UUID(str(said["group"]))
        except ValueError:
            raise InvalidInput(
                f"line {number}: group {said['group']!r} is not the id of a job group",
                hint="--group takes its name, for all lines.",
            ) from None
    given = {name: value for name, value in said.items() if value is not None or name == "data"}
    for name in ("priority", "max_attempts"):
        if name in given:
            given[name] = _whole(name, given[name], number)
    return replace(defaults, **given)


def _whole(name: str, value: object, number: int) -> int:
    try:
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass
    raise InvalidInput(f"line {number}: {name} {value!r} is not a whole number")
