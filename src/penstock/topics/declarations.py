"""Declarations of topics, as `Penstock` offers them."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from penstock.core.checks import check_flag, check_name, check_number
from penstock.errors import InvalidInput
from penstock.jobs.declarations import JobDeclarations
from penstock.postgres.context import Context
from penstock.topics.topic import Topic

T = TypeVar("T")


class TopicDeclarations(JobDeclarations):
    """Declares topics."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.topics: dict[str, Topic[Any]] = {}

    @overload
    def topic(self, name: str, payload: type[T], *, keep: int | None = ..., encrypted: bool = ...) -> Topic[T]: ...
    @overload
    def topic(self, name: str, payload: Any = ..., *, keep: int | None = ..., encrypted: bool = ...) -> Topic[Any]: ...
    def topic(self, name: str, payload: Any = Any, *, keep: int | None = None, encrypted: bool = False) -> Topic[Any]:
        """Declare a topic, or get the declared one.

        Args:
            name: Name of the topic.
            payload: Type of its messages.
            keep: Number of the last messages that a new subscriber gets; None: the stored value, 0 for a new topic.
            encrypted: Whether messages, and what belongs to their copies, are stored encrypted, with the keys of the application.
                The subscribers of such a topic have no filters.

        Raises:
            InvalidInput: The name or an option is not valid, or the topic is declared with another payload or option.
        """
        check_name("topic", name, 150)
        if keep is not None:
            check_number(f"keep of topic {name}", keep, 0, 100_000)
        check_flag("encrypted", encrypted)
        if name not in self.topics:
            self.topics[name] = Topic(self.context, self.add_type, name, payload, keep, encrypted)
        elif payload is not Any or keep is not None or encrypted:
            raise InvalidInput(f"topic {name} is declared twice", hint="Declare it once, then get it by its name alone.")
        return self.topics[name]
