"""Code that every capability uses and none owns: serialization, coalescing, polling, logs, the caller's transaction."""
