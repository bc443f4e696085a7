"""Pools: jobs of one key run in order, one at a time, on the one worker that owns the key."""
