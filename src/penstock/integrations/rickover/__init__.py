"""The downstream worker: jobs are sent to a service over HTTP, as Rickover does."""
