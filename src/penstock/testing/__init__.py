"""Tools for tests of applications: temporary databases, and workers in the test's own process. See docs/testing.md.

With pytest, the fixtures of `penstock.testing.plugin` are there when the package is installed. Its settings name the application:

    [pytest]
    penstock_app = mailshop:app

    async def test_it(penstock_app):
        async with penstock_app as app:
            await send_mail.enqueue("ada@example.com")
            [job] = await run_due_jobs(app)
            assert job.status == "succeeded"
"""

from penstock.testing.assertions import assert_enqueued, assert_not_enqueued, enqueued
from penstock.testing.clock import advance
from penstock.testing.databases import TemporaryDatabases, memory_folder
from penstock.testing.running import consumed, on_database, run_due, run_due_jobs, run_job, running_worker

__all__ = [
    "TemporaryDatabases",
    "advance",
    "assert_enqueued",
    "assert_not_enqueued",
    "consumed",
    "enqueued",
    "memory_folder",
    "on_database",
    "run_due",
    "run_due_jobs",
    "run_job",
    "running_worker",
]
