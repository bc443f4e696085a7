"""One order service, written for Celery, Dramatiq, Procrastinate and Penstock. docs/coming-from compares the programs."""
