"""Pools over HTTP."""
