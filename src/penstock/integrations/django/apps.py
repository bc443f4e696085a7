"""The application of Django that `INSTALLED_APPS` names."""

from __future__ import annotations

from django.apps import AppConfig


class PenstockConfig(AppConfig):
    """Gives a project `manage.py penstock` and read-only pages in the admin."""

    name = "penstock.integrations.django"
    label = "penstock"
    verbose_name = "Penstock"
