"""Transactional publish: subscribers get the messages when the caller's transaction commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.transactional import fetch_document, in_callers_task
from penstock.topics import queries
from penstock.topics.models import Published


@in_callers_task
async def publish_through(connection: Any, topic: str, documents: Sequence[str]) -> list[Published]:
    """Publish messages (`queries.publish_document`) through a connection of asyncpg, psycopg, SQLAlchemy or Django."""
    rows = await fetch_document(connection, queries.PUBLISH, topic, queries.array_of(documents))
    return [queries.published(row) for row in rows]
