"""Declarations of topics, as `Penstock` offers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from penstock.core.checks import check_flag, check_name, check_number, refusing_unknown
from penstock.core.keys import PayloadForm
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
    def topic(
        self,
        name: str,
        payload: type[T],
        *,
        key: str | Callable[[T], str | None] | None = ...,
        catch_up: int | None = ...,
        encrypted: bool = ...,
    ) -> Topic[T]: ...
    @overload
    def topic(
        self,
        name: str,
        payload: PayloadForm = ...,
        *,
        key: str | Callable[[Any], str | None] | None = ...,
        catch_up: int | None = ...,
        encrypted: bool = ...,
    ) -> Topic[Any]: ...
    @overload
    def topic(
        self,
        name: str,
        payload: object,
        *,
        key: str | Callable[[T], str | None] | None = ...,
        catch_up: int | None = ...,
        encrypted: bool = ...,
    ) -> Topic[Any]: ...
    @refusing_unknown("a topic")
    def topic(
        self,
        name: str,
        payload: Any = Any,
        *,
        key: str | Callable[[Any], str | None] | None = None,
        catch_up: int | None = None,
        encrypted: bool = False,
    ) -> Topic[Any]:
        """Declare a topic, or get the declared one.

        Args:
            name: Name of the topic.
            payload: Type of its messages.
            key: Name of a field of the payload, or a function of it, that gives the copies of a message their key, unless
                `publish` gives one.
            catch_up: Number of the last messages that a new subscriber gets; None: the stored value, 0 for a new topic.
            encrypted: Whether messages, and what belongs to their copies, are stored encrypted, with the keys of the application.
                The subscribers of such a topic have no filters.

        Raises:
            InvalidInput: The name or an option is not valid, or the topic is declared with another payload or option.
        """
        check_name("topic", name, 150)
        if catch_up is not None:
            check_number(f"catch_up of topic {name}", catch_up, 0, 100_000)
        check_flag("encrypted", encrypted)
        if name not in self.topics:
            self.topics[name] = Topic(self.context, self.add_type, name, payload, catch_up, encrypted, key)
        elif payload is not Any or key is not None or catch_up is not None or encrypted:
            raise InvalidInput(f"topic {name} is declared twice", hint="Declare it once, then get it by its name alone.")
        return self.topics[name]
