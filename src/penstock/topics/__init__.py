"""Topics: each published message reaches every subscriber as a job of its own."""
