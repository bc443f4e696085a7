"""What commands that run workers have in common: --metrics and --log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.extras import needs
from penstock.core.measuring import measured

if TYPE_CHECKING:
    from penstock.app import Penstock
    from penstock.worker.progress import Progressing

Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST]:PORT", help="Serve /metrics for Prometheus, /livez and /readyz; on loopback unless HOST is given."
    ),
]
Log = Annotated[str, typer.Option("--log", envvar="PENSTOCK_LOG", help="console or json.")]


def check_log(format: str) -> None:
    """Raise `typer.BadParameter` when there is no such format of a log."""
    if format not in ("console", "json"):
        raise typer.BadParameter(f"{format!r} is neither console nor json", param_hint="--log")


def metrics_address(metrics: str | None) -> tuple[str, int] | None:
    """Host and port of --metrics; None: it was not given.

    Raises:
        InvalidInput: It is not an address.
        MissingExtra: The extra `metrics` is not installed.
    """
    if metrics is None:
        return None
    from penstock.worker.endpoint import parse_address

    address = parse_address(metrics)
    with needs("metrics", "--metrics"):
        import prometheus_client  # noqa: F401
    return address


@asynccontextmanager
async def measured_at(
    app: Penstock, address: tuple[str, int] | None, workers: Callable[[], Sequence[Progressing]]
) -> AsyncIterator[None]:
    """Measure this process and serve its metrics while the block lasts.

    Args:
        app: The application, which need not be open.
        address: Host and port; None: nothing is measured.
        workers: The workers of this process, as far as they exist.
    """
    if address is None:
        yield
        return
    from penstock.cli import worker_metrics

    url = await app.start_server()
    with measured() as meter, worker_metrics.of_process(app, url, address, meter, workers):
        yield
