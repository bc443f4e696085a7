"""Pages in Django's admin that show job types and jobs, and change nothing."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.utils.functional import cached_property

from penstock.integrations.django.models import ArchivedJob, JobType, QueuedJob

_MOST_ROWS = 10_000


class _FewPages(Paginator):
    """A paginator that counts at most 10,000 rows, since a count of all reads them all."""

    @cached_property
    def count(self) -> int:
        """The number of rows, at most 10,000."""
        return len(self.object_list.values_list("pk")[:_MOST_ROWS])


class _ReadOnly(admin.ModelAdmin):
    """A page that only shows."""

    show_full_result_count = False
    paginator = _FewPages
    list_per_page = 50

    def has_add_permission(self, request: Any) -> bool:
        """No."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """No."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """No."""
        return False


@admin.register(JobType)
class JobTypeAdmin(_ReadOnly):
    """Job types."""

    list_display = ("name", "delivery_strategy", "max_attempts", "concurrency", "paused_at")


@admin.register(QueuedJob)
class QueuedJobAdmin(_ReadOnly):
    """Jobs that wait or run."""

    list_display = ("id", "name", "key", "status", "run_after", "created_at")
    list_filter = ("status",)
    ordering = ("id",)


@admin.register(ArchivedJob)
class ArchivedJobAdmin(_ReadOnly):
    """Finished jobs."""

    list_display = ("id", "name", "key", "status", "finished_at")
    # The newest ids first: no other order has an index over all partitions.
    ordering = ("-id",)
