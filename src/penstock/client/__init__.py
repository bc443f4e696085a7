"""A typed client of the HTTP API, for threads (`Client`) and for asyncio (`AsyncClient`)."""

from penstock.client.answers import AccessDenied
from penstock.client.calls import Claimed, Result
from penstock.client.clients import AsyncClient, Client
from penstock.client.sockets import Delivery
from penstock.client.stream_calls import MemberBatch, Reading
from penstock.client.streams import AsyncMembership, AsyncStream, Membership, Stream
from penstock.client.topics import AsyncTopic, Topic

__all__ = [
    "AccessDenied", "AsyncClient", "AsyncMembership", "AsyncStream", "AsyncTopic", "Claimed", "Client", "Delivery", "MemberBatch",
    "Membership", "Reading", "Result", "Stream", "Topic",
]  # fmt: skip
