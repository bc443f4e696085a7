"""Schedules: timers and cron expressions, whose runs are jobs."""
