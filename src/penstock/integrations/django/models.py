"""Tables of Penstock as models, for looking: they are not managed, and nothing writes through them."""

from __future__ import annotations

from django.db import models


class JobType(models.Model):
    """A job type, with its options."""

    name = models.TextField(primary_key=True)
    delivery_strategy = models.TextField()
    max_attempts = models.SmallIntegerField()
    concurrency = models.IntegerField(null=True)
    visibility_timeout = models.DurationField()
    paused_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField()

    class Meta:
        """Where the table is."""

        managed = False
        db_table = 'penstock"."jobs'
        ordering = ("name",)

    def __str__(self) -> str:
        return str(self.name)


class QueuedJob(models.Model):
    """A job that waits or runs."""

    id = models.UUIDField(primary_key=True)
    name = models.TextField()
    key = models.TextField(null=True)
    status = models.TextField()
    priority = models.SmallIntegerField()
    run_after = models.DateTimeField()
    created_at = models.DateTimeField()
    data = models.JSONField()
    errors = models.JSONField(null=True)
    progress = models.JSONField(null=True)

    class Meta:
        """Where the table is."""

        managed = False
        db_table = 'penstock"."queued_jobs'

    def __str__(self) -> str:
        return f"{self.name} {self.id}"


class ArchivedJob(models.Model):
    """A job that is finished."""

    id = models.UUIDField(primary_key=True)
    name = models.TextField()
    key = models.TextField(null=True)
    status = models.TextField()
    created_at = models.DateTimeField()
    finished_at = models.DateTimeField()
    data = models.JSONField()
    errors = models.JSONField(null=True)
    result = models.JSONField(null=True)

    class Meta:
        """Where the table is."""

        managed = False
        db_table = 'penstock"."archived_jobs'

    def __str__(self) -> str:
        return f"{self.name} {self.id}"
