"""Jobs: what they look like, how they are enqueued and looked up, and what fetchers and workers share about a job type."""
