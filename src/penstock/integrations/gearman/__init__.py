"""The bridge to a Gearman server."""

from penstock.core.extras import needs

with needs("gearman", "the bridge to Gearman"):
    import gear  # noqa: F401
