"""The subscription of a handler: how it begins when a worker starts, and goes on while the worker lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from penstock.core.logs import get_logger
from penstock.core.serialization import dump_json
from penstock.errors import Conflict, InvalidInput, PenstockError
from penstock.jobs import type_queries
from penstock.jobs.job_type import JobType
from penstock.jobs.options import Options
from penstock.postgres.database import Database
from penstock.topics import queries as topics

log = get_logger("penstock.topics")
_RENEWALS_IN_A_TTL = 4


@dataclass(frozen=True, slots=True)
class Subscription:
    """The subscription of a handler to a topic.

    Attributes:
        topic: Name of the topic.
        declare_topic: Creates the topic unless it exists.
        client_id: Name of the subscriber within the topic.
        ttl: Time after which it ends unless it is renewed; None: it does not end.
        filter: JSON that a message must contain; None: it gets every message.
    """

    topic: str
    declare_topic: Callable[[], Awaitable[None]]
    client_id: str
    ttl: timedelta | None
    filter: Any

    @property
    def works(self) -> bool:
        """See `Declarer`."""
        return False

    async def declare_type(self, database: Database, options: Options, *, again: bool) -> None:
        """See `Declarer`. A queue is dropped with its subscription, which this begins again."""
        await self.begin(database, options.as_json())
        await type_queries.declare_job_type(database, f"{self.topic}_{self.client_id}", options.as_json())

    async def begin(self, database: Database, options: dict[str, Any], since: int | None = None) -> None:
        """Subscribe, which also creates the job type. It begins after `since`, or with the last messages that are due to it."""
        await self.declare_topic()
        await topics.subscribe_many(
            database, self.topic, [self.client_id], ttl=self.ttl, filter=filter_text(self.filter), since=since, options=options
        )

    async def begin_again(self, database: Database, options: dict[str, Any], since: int | None) -> None:
        """Subscribe again after the subscription of a live worker has ended, as in a long outage: continue at its position."""
        try:
            await self.begin(database, options, since)
        except (Conflict, InvalidInput) as error:
            # The messages were pruned meanwhile, or are too many for one call.
            log.error("messages_missed", topic=self.topic, client_id=self.client_id, since=since, error=error)
            await self.begin(database, options)


def subscription_of(type: JobType[Any]) -> Subscription | None:
    """The subscription whose copies are the jobs of a type; None when the type is not the queue of a subscriber."""
    return type.declarer if isinstance(type.declarer, Subscription) else None


def filter_text(filter: Any) -> str | None:
    """A filter as JSON text. Raises `InvalidInput`."""
    return None if filter is None else dump_json(filter, "a filter")


async def renew_subscriptions(database: Database, subscriptions: list[tuple[Subscription, dict[str, Any]]]) -> None:
    """Renew subscriptions with a time to live until cancelled. A subscription that has ended continues at its position.

    Args:
        database: Database of the topics.
        subscriptions: Subscriptions with the options of their job types.
    """
    living = {(s.topic, s.client_id): (s, options) for s, options in subscriptions if s.ttl is not None}
    shortest = min((s.ttl for s, _ in living.values() if s.ttl is not None), default=timedelta(days=1))
    # The number of the last message up to which each subscription is known to have existed.
    known: dict[tuple[str, str], int] = {}
    while True:
        try:
            renewed = await topics.renew(database, list(living)) if living else {}
            for missing in living.keys() - renewed.keys():
                log.warning("subscription_lapsed", topic=missing[0], client_id=missing[1], since=known.get(missing))
                subscription, options = living[missing]
                await subscription.begin_again(database, options, known.get(missing))
            known.update(renewed)
        except PenstockError as error:
            log.warning("renewal_failed", error=error)
        await asyncio.sleep(shortest.total_seconds() / _RENEWALS_IN_A_TTL)
