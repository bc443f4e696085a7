"""Ownership: a group of members shares slots. `assign` decides who gets which (pure); `state` is what one member knows and does
next (pure); `member` runs it against the database. Serves pools and streams, and knows nothing of either.
"""
