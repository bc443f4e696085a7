"""A typed client of the HTTP API, for threads (`Client`) and for asyncio (`AsyncClient`)."""

from penstock.client.answers import AccessDenied
from penstock.client.calls import Claimed, Result
from penstock.client.clients import AsyncClient, Client

__all__ = ["AccessDenied", "AsyncClient", "Claimed", "Client", "Result"]
