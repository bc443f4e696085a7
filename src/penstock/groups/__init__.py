"""Membership groups: members share slots by one protocol. Pools and consumer groups use it; it depends on neither."""
