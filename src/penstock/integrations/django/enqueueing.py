"""Enqueueing from views, signals and commands of Django."""

from __future__ import annotations

from typing import Any, ParamSpec
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import UUID

from django.db import connections, transaction

from penstock.integrations.django.settings import alias, database_url
from penstock.jobs.job_type import JobCall, JobType
from penstock.jobs.models import make_id
from penstock.jobs.records import parse_id

P = ParamSpec("P")


def same_database(declared: JobType[Any]) -> bool:
    """Whether the application of a job type uses the database whose transactions Django manages.

    Both are compared by host, port and name, so that two names of one host count as two databases; that is safe.
    """
    url = declared.context.settings.database_url
    return url is not None and _place(url.get_secret_value()) == _place(database_url(alias()))


def _place(url: str) -> tuple[str, str, str]:
    parts = urlsplit(url)
    given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    host = given.get("host") or unquote(parts.hostname or "localhost")
    return host, given.get("port") or str(parts.port or 5432), unquote(parts.path.removeprefix("/"))


def enqueue(type: JobType[P] | JobCall[P], /, *args: P.args, **kwargs: P.kwargs) -> UUID:
    """Enqueue a job with the work of the current transaction of Django: it exists when that commits, and never otherwise.

        with transaction.atomic():
            order = Order.objects.create(customer="acme")
            enqueue(send_invoice.options(key="acme"), order.id)

    When the application uses the same database, the job is written in the transaction. Otherwise it is enqueued after the commit,
    so that a crash in between loses it. Without a transaction it is enqueued at once.

    Args:
        type: Job type, or one with options.
        args: Arguments of the job.
        kwargs: Arguments of the job by name.

    Returns:
        The id of the job.

    Raises:
        InvalidInput: The arguments do not fit; nothing is enqueued.
    """
    declared = type if isinstance(type, JobType) else type.type
    call: JobCall[Any] = type.options() if isinstance(type, JobType) else type
    new = call.new(*args, **kwargs)
    id = make_id() if new.id is None else parse_id(new.id)
    call = call.with_id(id)
    if same_database(declared):
        call.through(connections[alias()]).sync.enqueue(*args, **kwargs)
    else:
        # What is wrong with the payload is said here, and not after the commit.
        declared.codec.dump(new.data)
        transaction.on_commit(lambda: call.sync.enqueue(*args, **kwargs) and None, using=alias())
    return id
