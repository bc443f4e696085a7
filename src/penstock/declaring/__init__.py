"""What an application declares: a file for jobs, pools and topics, one for streams, and one for schedules."""

from penstock.declaring.jobs import JobDeclarations, JobType
from penstock.declaring.schedules import ScheduleDeclarations
from penstock.declaring.streams import StreamDeclarations

__all__ = ["JobDeclarations", "JobType", "ScheduleDeclarations", "StreamDeclarations"]
