"""Time in tests: instead of waiting, a test moves everything that is planned to an earlier time."""

from __future__ import annotations

from datetime import timedelta
from importlib import resources

from penstock.app import Penstock
from penstock.core.checks import check_span


async def advance(app: Penstock, span: timedelta) -> None:
    """Let time pass for what is planned: retries, jobs for later, sleeps and timeouts of durable steps, expiries, schedules,
    periods of unique keys, and subscriptions with a time to live.

    The clock is that of the database, which no test can move. So this moves what is planned to a time that is earlier by the
    span: a retry in 30 s is due after `await advance(app, timedelta(seconds=30))`. The `at` of a `Tick` is earlier by it too.
    Times that have passed (of the archive, of events) do not change.

    Args:
        app: An open application.
        span: How much time passes.

    Raises:
        InvalidInput: The span is not a positive timedelta.
    """
    check_span("span", span)
    statement = resources.files(__package__).joinpath("advance.sql").read_text()
    await (await app.database()).fetch(statement, span)
