"""What a program sees of the consumer groups of a stream, and changes there: lag, offsets, pauses, dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from penstock.core.checks import check_number, check_text
from penstock.streams import group_queries
from penstock.streams.checks import check_offsets, check_partitions
from penstock.streams.declared_stream import DeclaredStream
from penstock.streams.group_models import Lag, held_back
from penstock.streams.models import HeldBack, Start

T = TypeVar("T")


class GroupControl(DeclaredStream[T], Generic[T]):
    """The part of `Stream` about its consumer groups, by their names: which application has their handlers does not matter."""

    async def lag(self, group: str | None = None) -> list[Lag]:
        """The lag of a group (None: of all groups) in each partition. Raises `NotFound` for an unknown group or stream.

        Args:
            group: Name of the consumer group; None: all groups.
        """
        if group is not None:
            check_text("group", group)
        return await group_queries.lag(await self.context.database(), self.name, group, self.context.keyring)

    async def held_back(self, group: str | None = None) -> list[HeldBack]:
        """Paused partitions that keep a group (None: each group) from beginning the partitions of a later growth.

        Args:
            group: Name of the consumer group; None: all groups.
        """
        return held_back(await self.lag(group))

    async def seek(self, group: str, to: Start) -> None:
        """Move a group to "earliest", "latest", a time, or to offsets by partition. Its consumers continue from there.

        Args:
            group: Name of the consumer group.
            to: "earliest", "latest", a time, or offsets by partition.

        Raises:
            NotFound: The group does not exist.
            InvalidInput: An offset is outside of the stored range.
        """
        check_text("group", group)
        await group_queries.seek_group(await self.context.database(), self.name, group, await self.offsets_at(to))

    async def pause(self, group: str, partitions: Sequence[int] | None = None, *, reason: str | None = None) -> int:
        """Pause partitions (None: all) of a group until `resume`. Returns how many were not paused before.

        Args:
            group: Name of the consumer group.
            partitions: Numbers of the partitions; None: all.
            reason: Reason for people, shown beside the partition.
        """
        check_text("group", group)
        check_partitions(partitions)
        if reason is not None:
            check_text("reason", reason)
        return await group_queries.pause_partitions(await self.context.database(), self.name, group, partitions, reason)

    async def resume(self, group: str, partitions: Sequence[int] | None = None) -> int:
        """End the pause or quarantine of partitions (None: all). Returns how many were paused.

        Args:
            group: Name of the consumer group.
            partitions: Numbers of the partitions; None: all.
        """
        check_text("group", group)
        check_partitions(partitions)
        return await group_queries.resume_partitions(await self.context.database(), self.name, group, partitions)

    async def drop_group(self, group: str) -> None:
        """Drop a group. Raises `Conflict` while it has members.

        Args:
            group: Name of the consumer group.
        """
        check_text("group", group)
        await group_queries.drop_group(await self.context.database(), self.name, group)

    async def replay_dead(self, *, offsets: Mapping[int, int] | None = None, limit: int = 1_000) -> int:
        """Append dead letters to the stream again, for the consumer group in which they failed; other groups skip them.

        Replayed letters are not replayed again: the group `penstock.replay` of the stream `<name>.dead` records the position.

        Args:
            offsets: Offsets to replay from, by partition of the dead letters, including replayed ones; None: letters that were
                not replayed.
            limit: Maximum number of letters; fewer are replayed when they are large.

        Returns:
            Number of replayed letters. 0: none are left.
        """
        check_number("limit", limit, 1, 100_000)
        if offsets is not None:
            check_offsets(offsets)
        return await group_queries.replay_dead(await self.context.database(), self.name, limit, offsets)
