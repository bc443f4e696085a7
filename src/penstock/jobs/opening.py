"""What a reader sees of encrypted jobs: the documents, where it has their keys, and the word "encrypted" where it has not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import orjson

from penstock.core.encryption import ENCRYPTED, Keyring, is_envelope, key_id_of, opened_entry, owned_by
from penstock.core.serialization import load_json
from penstock.errors import Unreadable
from penstock.jobs import queries as jobs
from penstock.jobs.records import JobRecord, LogLine
from penstock.postgres.context import Context


async def find(context: Context, ids: Sequence[UUID], *, log: bool = False) -> dict[UUID, JobRecord]:
    """The records of these jobs, opened with the keys of the application; see `queries.find`."""
    found = await jobs.find(await context.database(), ids, log=log)
    return {id: opened(record, context.keyring) for id, record in found.items()}


def opened(record: JobRecord, keyring: Keyring) -> JobRecord:
    """A record with its documents decrypted, as far as the keys allow. A record that is not encrypted is returned as it is."""
    if not record.encrypted:
        return record
    id = str(record.id)
    error = owned_by("error", record.name, id)
    return replace(
        record,
        data=open_value(record.data, keyring, *_owners_of_payload(record.name)),
        result=open_value(record.result, keyring, owned_by("result", record.name, id)),
        progress=open_value(record.progress, keyring, owned_by("progress", record.name, id)),
        errors=[opened_entry(keyring, error, one) for one in record.errors],
        log=tuple(_opened_line(keyring, owned_by("log", record.name, id), line) for line in record.log),
    )


def result_of(record: JobRecord, keyring: Keyring) -> Any:
    """The result of a job for a program that uses it. Raises `Unreadable`, or `KeyMissing`, where a reader sees a word."""
    if not record.encrypted or not is_envelope(record.result):
        return record.result
    return load_json(keyring.open(orjson.dumps(record.result).decode(), owned_by("result", record.name, str(record.id))))


def open_value(value: Any, keyring: Keyring, *owners: bytes) -> Any:
    """The document of an envelope that one of these owners may have; every other value is returned as it is."""
    if not is_envelope(value):
        return value
    text = orjson.dumps(value).decode()
    for owner in owners:
        try:
            return load_json(keyring.open(text, owner))
        except Unreadable:
            continue
    return ENCRYPTED


def _opened_line(keyring: Keyring, owner: bytes, line: LogLine) -> LogLine:
    if key_id_of(line.line) is None:
        return line
    try:
        return replace(line, line=load_json(keyring.open(line.line, owner))["line"])
    except Unreadable:
        return replace(line, line=ENCRYPTED)


def _owners_of_payload(name: str) -> Iterator[bytes]:
    """What the payload of a job may belong to: its type, or the topic of which it is a copy."""
    yield owned_by("job", name)
    # The queue of a subscriber is named <topic>_<client id>; both may have underscores.
    for index, letter in enumerate(name):
        if letter == "_":
            yield owned_by("message", name[:index])
