"""An app for the fleet's tests."""

from penstock import Job, Penstock

app = Penstock()


@app.job("count", max_attempts=3)
async def count(job: Job[int]) -> None:
    """Succeeds."""
