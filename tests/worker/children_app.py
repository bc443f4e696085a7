"""An application whose handlers run in processes, which die, are ended, or raise what nobody can read."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from penstock import Backoff, Depends, Fail, Job, Penstock, Settings

app = Penstock(settings=Settings(processes_for_handlers=2, dead_after=2.0, heartbeat_interval=0.4, maintenance_interval=0.2))


class Declined(Exception):
    """Is made from other arguments than it passes on, so that it cannot be made again from them."""

    def __init__(self, card: str, amount: int) -> None:
        super().__init__(f"card {card} was declined")
        self.amount = amount


class Refused(Fail):
    """The same, of an error that is final."""

    def __init__(self, *, card: str) -> None:
        super().__init__(f"card {card} was refused")


class Unreadable:
    """A result that is written and cannot be read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Declined, ("one argument too few",))


def run(job: Job[dict[str, Any]]) -> list[int]:
    """Do what the payload says. Returns its process, the process of the worker and the number of the attempt."""
    match job.data.get("does"):
        case "exit":
            os._exit(9)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "decline":
            raise Declined("4711", 5)
        case "refuse":
            raise Refused(card="4711")
        case "answer badly":
            return Unreadable()  # type: ignore[return-value]
        case "wait":
            Path(job.data["begun"]).write_text(str(os.getpid()))
            while not Path(job.data["until"]).exists():
                time.sleep(0.02)
    return [os.getpid(), os.getppid(), job.attempt]


BACKOFF = Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=20))
app.job("child", executor="process", keep_result=True, max_attempts=2, backoff=BACKOFF)(run)
app.job("single", executor="process", keep_result=True, max_attempts=1)(run)
app.job("once", executor="process", keep_result=True, delivery="at_most_once")(run)


def get_rate() -> int:
    """A dependency for which a test has a stand-in."""
    return 1


def get_price(rate: Annotated[int, Depends(get_rate)]) -> int:
    """A dependency of which a dependency has a stand-in."""
    return 10 * rate


def fake_rate() -> int:
    """Stands in for `get_rate`."""
    return 7


@app.job("priced", executor="process", keep_result=True, max_attempts=1)
def priced(job: Job[str], price: Annotated[int, Depends(get_price)]) -> list[Any]:
    """Says its price, and which database its application has."""
    return [price, app.database_url()]


def price_it(job: Job[str]) -> str:
    """The same of a function that is declared by a call."""
    return app.database_url()


app.job("called", executor="process", keep_result=True, max_attempts=1)(price_it)
