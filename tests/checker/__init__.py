"""Checkers of recorded histories: they hold what was promised against what was seen, and know nothing of how Penstock works."""
