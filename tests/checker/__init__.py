"""Checkers of recorded histories: they compare observations with the promises, and know nothing of how Penstock works."""
