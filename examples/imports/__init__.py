"""An import of 100,000 lines, each a job, with a report when all of them have ended."""
