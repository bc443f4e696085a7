"""Workflows: jobs that wait for other jobs."""
