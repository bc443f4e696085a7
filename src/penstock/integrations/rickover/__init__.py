"""The downstream worker: jobs are sent to a service over HTTP, as Rickover does."""

from penstock.core.extras import needs

with needs("http", "the downstream worker"):
    import aiohttp  # noqa: F401
