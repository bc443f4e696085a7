"""Streams: ordered, partitioned logs of events, shared by groups of consumers."""
