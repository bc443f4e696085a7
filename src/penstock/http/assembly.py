"""A server process from its parts: which there are, which notification is for which, and how they end."""

from __future__ import annotations

from penstock.app import Penstock
from penstock.core import tally as tallies
from penstock.core.meter import Meter
from penstock.http.asked_metrics import AskedMetrics
from penstock.http.auth import Authenticator
from penstock.http.completion_waiter import JobWaiter, MessageWaiter
from penstock.http.dashboard.dashboard import Dashboard
from penstock.http.jobs.enqueuing import SingleJobs
from penstock.http.metrics import Metrics
from penstock.http.service import Service
from penstock.http.settings import HttpSettings
from penstock.http.streams.appends import Appends
from penstock.http.streams.broadcaster import Broadcaster
from penstock.http.streams.memberships import Memberships
from penstock.http.topics.deliveries import Deliveries
from penstock.http.workers.claims import Claims
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.postgres.notifications import Notifications


class Assembly:
    """The service of one process with all of its parts.

    Args:
        app: An open app.
        database: Its database.
        authenticator: Decides who comes in.
        settings: Settings of the server.
        listener: Receives the notifications to this process.
        meter: Of this process.
    """

    def __init__(
        self,
        app: Penstock,
        database: Database,
        authenticator: Authenticator,
        settings: HttpSettings,
        listener: Listener,
        meter: Meter,
    ) -> None:
        self.service = service = Service(app, database, authenticator, settings, Metrics(meter, tallies.of(database)))
        stopping = service.stopping
        self._asked = service.add(AskedMetrics(service))
        service.add(SingleJobs(database, service.metrics))
        service.add(Appends(database))
        self._jobs = service.add(JobWaiter(database, stopping))
        self._messages = service.add(MessageWaiter(database, stopping))
        self._claims = service.add(Claims(database, stopping))
        self._broadcaster = service.add(Broadcaster(database, f"penstock_{self._claims.id}", stopping))
        grace_s = app.settings.handover_grace.total_seconds()
        self._memberships = service.add(Memberships(database, self._broadcaster, listener, stopping, grace_s, meter))
        self._deliveries = service.add(Deliveries(database, listener, app.settings))
        listener.add(f"penstock_{self._claims.id}")

        async def same_authenticator() -> Authenticator:
            return authenticator

        self._dashboard = service.add(
            Dashboard(app, same_authenticator, settings, origins=service.origins, stopping=stopping, bare=False)
        )

    def stop(self) -> None:
        """End long polls, waits and live connections; what is being committed goes on."""
        self.service.stopping.set()
        self._jobs.stop()
        self._messages.stop()
        self._claims.stop()
        self._broadcaster.stop()
        self._memberships.stop()
        self._deliveries.stop("the server stops")

    async def close(self) -> None:
        """Settle what was handed out, and take leave of the database."""
        await self._deliveries.aclose()
        await self._broadcaster.close()
        await self._dashboard.close()
        self._asked.read.close()
        self.service.answering.close()
        await self.service.access.close()

    def subscribe(self, notifications: Notifications) -> None:
        """Have the parts told of what this process listens to."""
        self._claims.subscribe(notifications)
        self._deliveries.subscribe(notifications)
        self._broadcaster.subscribe(notifications)
        self._memberships.subscribe(notifications)

    def jobs_ready(self) -> None:
        """Jobs became ready: let the requests that wait for some look."""
        self._claims.wake_all()
        self._deliveries.wake()
