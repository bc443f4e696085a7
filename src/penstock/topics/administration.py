"""What people and programs do with topics by their names, declared here or not: a part of `Penstock`."""

from __future__ import annotations

from typing import Any

from penstock.core.checks import check_text
from penstock.topics import queries as topics
from penstock.topics.declarations import TopicDeclarations
from penstock.topics.models import TopicCounts
from penstock.topics.topic import Topic


class TopicAdministration(TopicDeclarations):
    """Finds and counts topics."""

    async def find_topic(self, name: str) -> Topic[Any]:
        """An existing topic, whether or not this app declares it. Raises `NotFound`.

        Args:
            name: Name of the topic.
        """
        check_text("name", name)
        record = await topics.topic(await self.context.database(), name)
        topic = self.topic(name)
        topic.encrypted = topic.encrypted or record.encrypted
        return topic

    async def topic_counts(self) -> list[TopicCounts]:
        """Counts of each topic."""
        return await topics.counts(await self.context.database())
