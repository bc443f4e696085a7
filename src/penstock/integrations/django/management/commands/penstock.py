"""`manage.py penstock worker|migrate|declare`: with the application that the settings name."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from penstock.errors import PenstockError
from penstock.integrations.django.settings import find_app


class Command(BaseCommand):
    """Runs a worker, creates or updates the schema, or writes declarations."""

    help = "Run a worker of the application in PENSTOCK['APP'], create or update Penstock's schema, or write declarations."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the arguments."""
        parser.add_argument("action", choices=["worker", "migrate", "declare"])
        parser.add_argument("names", nargs="*", help="worker: job types, pools, consumer groups and schedules; none: all")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command."""
        app = find_app()
        try:
            if options["action"] == "worker":
                app.run_worker_sync(*options["names"])
            elif options["action"] == "migrate":
                done = app.sync.migrate()
                self.stdout.write(f"applied: {', '.join(done.tables) or 'nothing'}")
            else:
                self.stdout.write("\n".join(app.sync.declare()))
        except PenstockError as error:
            raise CommandError(str(error)) from None
        finally:
            app.sync.close()
