"""Generated from the docstrings: change those, and run `make reference`."""

from penstock._version import __version__ as __version__
from penstock.app import Penstock as Penstock
from penstock.core.dependencies import Depends as Depends
from penstock.core.dependencies import inject as inject
from penstock.core.hooks import Lifespan as Lifespan
from penstock.errors import Conflict as Conflict
from penstock.errors import DatabaseUnavailable as DatabaseUnavailable
from penstock.errors import EmbeddedServerError as EmbeddedServerError
from penstock.errors import Fail as Fail
from penstock.errors import InvalidInput as InvalidInput
from penstock.errors import JobFailed as JobFailed
from penstock.errors import KeyMissing as KeyMissing
from penstock.errors import MissingExtra as MissingExtra
from penstock.errors import NotFound as NotFound
from penstock.errors import OffsetGone as OffsetGone
from penstock.errors import PenstockError as PenstockError
from penstock.errors import QueueFull as QueueFull
from penstock.errors import Retry as Retry
from penstock.errors import SchemaMismatch as SchemaMismatch
from penstock.errors import Snooze as Snooze
from penstock.errors import Unreadable as Unreadable
from penstock.jobs.child import ChildJob as ChildJob
from penstock.jobs.declarations import JobOptions as JobOptions
from penstock.jobs.group_record import JobGroupRecord as JobGroupRecord
from penstock.jobs.handler import Job as Job
from penstock.jobs.handler import Jobs as Jobs
from penstock.jobs.handler import current_job as current_job
from penstock.jobs.job_type import JobType as JobType
from penstock.jobs.models import Enqueued as Enqueued
from penstock.jobs.models import EnqueueOutcome as EnqueueOutcome
from penstock.jobs.models import NewJob as NewJob
from penstock.jobs.models import NewJobOptions as NewJobOptions
from penstock.jobs.options import Backoff as Backoff
from penstock.jobs.options import Delivery as Delivery
from penstock.jobs.options import Options as Options
from penstock.jobs.options import PoolOptions as PoolOptions
from penstock.jobs.options import RateLimit as RateLimit
from penstock.jobs.records import HandlerRecord as HandlerRecord
from penstock.jobs.records import JobCounts as JobCounts
from penstock.jobs.records import JobRecord as JobRecord
from penstock.jobs.records import LogLine as LogLine
from penstock.jobs.records import Status as Status
from penstock.jobs.records import Why as Why
from penstock.jobs.steps import StepRecord as StepRecord
from penstock.jobs.steps import Suspended as Suspended
from penstock.jobs.top import TopRecord as TopRecord
from penstock.operations.models import Erasure as Erasure
from penstock.operations.models import ErasurePreview as ErasurePreview
from penstock.operations.models import JobFilter as JobFilter
from penstock.operations.models import OperationPreview as OperationPreview
from penstock.operations.models import OperationRecord as OperationRecord
from penstock.operations.operations import Operations as Operations
from penstock.pools.declarations import PoolSettings as PoolSettings
from penstock.pools.pool import Pool as Pool
from penstock.pools.pull_worker import PoolWorker as PoolWorker
from penstock.pools.pull_worker import PulledJob as PulledJob
from penstock.pools.standing import Standing as Standing
from penstock.schedules.schedule import Schedule as Schedule
from penstock.schedules.schedule import Tick as Tick
from penstock.settings import Keep as Keep
from penstock.settings import Settings as Settings
from penstock.streams.consumer.batch import Batch as Batch
from penstock.streams.consumer.batch import Events as Events
from penstock.streams.consumer.dispatcher import Halted as Halted
from penstock.streams.consumer.on_failure import OnFailure as OnFailure
from penstock.streams.models import Appended as Appended
from penstock.streams.models import Event as Event
from penstock.streams.models import NewEvent as NewEvent
from penstock.streams.models import Position as Position
from penstock.streams.models import Retention as Retention
from penstock.streams.models import StreamOptions as StreamOptions
from penstock.streams.producer import Producer as Producer
from penstock.streams.stream import Stream as Stream
from penstock.topics.models import Message as Message
from penstock.topics.models import NewMessage as NewMessage
from penstock.topics.models import Published as Published
from penstock.topics.models import ReceiverOutcome as ReceiverOutcome
from penstock.topics.models import Subscribed as Subscribed
from penstock.topics.models import Subscriber as Subscriber
from penstock.topics.models import TopicCounts as TopicCounts
from penstock.topics.topic import Topic as Topic
from penstock.worker.fleets import FleetRecord as FleetRecord
from penstock.worker.fleets import WorkerRecord as WorkerRecord
from penstock.worker.leader import Leader as Leader
from penstock.worker.leader import LeaderRecord as LeaderRecord
from penstock.worker.leader import LeaderTask as LeaderTask
from penstock.worker.overview import Overview as Overview
from penstock.worker.overview import Throughput as Throughput
from penstock.worker.problems import Problem as Problem
from penstock.workflows.graph import Workflow as Workflow
from penstock.workflows.job_group import JobGroup as JobGroup
from penstock.workflows.models import WorkflowRunRecord as WorkflowRunRecord
from penstock.workflows.models import WorkflowStepRecord as WorkflowStepRecord
from penstock.workflows.step import ResultOf as ResultOf
from penstock.workflows.step import Step as Step

__all__ = [
    "Appended",
    "Backoff",
    "Batch",
    "ChildJob",
    "Conflict",
    "DatabaseUnavailable",
    "Delivery",
    "Depends",
    "EmbeddedServerError",
    "EnqueueOutcome",
    "Enqueued",
    "Erasure",
    "ErasurePreview",
    "Event",
    "Events",
    "Fail",
    "FleetRecord",
    "Halted",
    "HandlerRecord",
    "InvalidInput",
    "Job",
    "JobCounts",
    "JobFailed",
    "JobFilter",
    "JobGroup",
    "JobGroupRecord",
    "JobOptions",
    "JobRecord",
    "JobType",
    "Jobs",
    "Keep",
    "KeyMissing",
    "Leader",
    "LeaderRecord",
    "LeaderTask",
    "Lifespan",
    "LogLine",
    "Message",
    "MissingExtra",
    "NewEvent",
    "NewJob",
    "NewJobOptions",
    "NewMessage",
    "NotFound",
    "OffsetGone",
    "OnFailure",
    "OperationPreview",
    "OperationRecord",
    "Operations",
    "Options",
    "Overview",
    "Penstock",
    "PenstockError",
    "Pool",
    "PoolOptions",
    "PoolSettings",
    "PoolWorker",
    "Position",
    "Problem",
    "Producer",
    "Published",
    "PulledJob",
    "QueueFull",
    "RateLimit",
    "ReceiverOutcome",
    "ResultOf",
    "Retention",
    "Retry",
    "Schedule",
    "SchemaMismatch",
    "Settings",
    "Snooze",
    "Standing",
    "Status",
    "Step",
    "StepRecord",
    "Stream",
    "StreamOptions",
    "Subscribed",
    "Subscriber",
    "Suspended",
    "Throughput",
    "Tick",
    "TopRecord",
    "Topic",
    "TopicCounts",
    "Unreadable",
    "Why",
    "WorkerRecord",
    "Workflow",
    "WorkflowRunRecord",
    "WorkflowStepRecord",
    "__version__",
    "current_job",
    "inject",
]
