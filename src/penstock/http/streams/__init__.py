"""Streams and consumer groups over HTTP."""
