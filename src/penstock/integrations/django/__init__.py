"""Penstock in a Django project: settings, `manage.py penstock`, enqueueing in Django's transactions, and pages in the admin.

    INSTALLED_APPS = [..., "penstock.integrations.django"]
    PENSTOCK = {"APP": "shop.jobs:app"}

`enqueue` enqueues in the transaction of Django when the application uses the same database, and after its commit otherwise.
"""

from __future__ import annotations

from penstock.integrations.django.enqueueing import enqueue, same_database
from penstock.integrations.django.settings import database_url, find_app

__all__ = ["database_url", "enqueue", "find_app", "same_database"]
