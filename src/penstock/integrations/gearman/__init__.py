"""The bridge to a Gearman server."""
