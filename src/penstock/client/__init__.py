"""A typed client of the HTTP API, for threads (`Client`) and for asyncio (`AsyncClient`)."""

from penstock.core.extras import needs

with needs("http", "the client of the HTTP API"):
    from penstock.client.aio.client import AsyncClient
    from penstock.client.aio.pools import AsyncPool
    from penstock.client.aio.streams import AsyncMembership, AsyncStream
    from penstock.client.aio.topics import AsyncTopic
    from penstock.client.answers import AccessDenied
    from penstock.client.deliveries import Delivery
    from penstock.client.sync.client import Client
    from penstock.client.sync.pools import Pool
    from penstock.client.sync.streams import Membership, Stream
    from penstock.client.sync.topics import Topic
    from penstock.jobs.http_models import Claimed, Result
    from penstock.streams.group_models import MemberBatch, Reading

__all__ = [
    "AccessDenied", "AsyncClient", "AsyncMembership", "AsyncPool", "AsyncStream", "AsyncTopic", "Claimed", "Client", "Delivery",
    "MemberBatch", "Membership", "Pool", "Reading", "Result", "Stream", "Topic",
]  # fmt: skip
