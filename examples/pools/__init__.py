"""Pools: fibonacci, background jobs of tenants, and requests routed to the endpoint that has the connection."""
