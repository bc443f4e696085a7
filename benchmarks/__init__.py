"""Measurements against the bare SQL, in one run: `make bench`."""
