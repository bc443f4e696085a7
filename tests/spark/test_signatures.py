"""Failure messages of well-known kinds: those of one cause are one signature, and another cause is another."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from rich.console import Console

from penstock.history.lake_queries import Failure
from penstock.spark import report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The signature, and lines that have it.
LINES: dict[str, list[str]] = {
    "SMTP <address> refused": [f"SMTP 10.0.0.{n}:25 refused" for n in (1, 120, 255)] + ["SMTP 192.168.1.1 refused"],
    "connect to <address> failed: No route to host": [
        "connect to [2001:db8::17]:5432 failed: No route to host",
        "connect to fe80::1%eth0 failed: No route to host",
        "connect to ::1 failed: No route to host",
        "connect to 2001:0db8:85a3:0000:0000:8a2e:0370:7334 failed: No route to host",
        "connect to ::ffff:10.0.0.1 failed: No route to host",
    ],
    "subnet <address> is full": ["subnet 10.0.0.0/8 is full", "subnet 2001:db8::/32 is full"],
    "no lease for <address>": ["no lease for 00:1a:2B:3c:4d:5e", "no lease for 00-1a-2B-3c-4d-5e"],
    "could not reach <host>": [
        "could not reach db-17.eu.example.com",
        "could not reach api.example.com:8443",
        "could not reach localhost:5432",
        "could not reach ip-10-0-0-1.ec2.internal",
        "could not reach redis-3:6379",
        "could not reach payments.shop.svc:80",
    ],
    "HTTP <n> from <url>": ["HTTP 503 from https://api.example.com/v1/x?id=7", "HTTP 404 from http://10.0.0.1:80/"],
    "bad pointer <hex>": ["bad pointer 0xDEADBEEF", "bad pointer 0x7f3a", "bad pointer 3f786850e387550fdab836ed7e6dc881de23001b"],
    "<object at <hex>> is closed": ["<object at 0x7f9057e716c0> is closed", "<object at 0x1> is closed"],
    "timed out after <duration>": [
        "timed out after 30s",
        "timed out after 1.5s",
        "timed out after 300ms",
        "timed out after 1h2m3s",
        "timed out after 12µs",
    ],
    "timed out after <n> seconds": ["timed out after 30 seconds", "timed out after 1.5 seconds"],
    "no column <text>": [
        "no column 'a'",
        'no column "b c"',
        r'no column "with \" in it"',
        "no column `x`",
        "no column \u201cy\u201d",
    ],
    "can't open <text> as user's file": ["can't open 'a.txt' as user's file", "can't open 'b' as user's file"],
    "order <id> is unknown": [
        "order 0190c0de-0000-7000-8000-000000000001 is unknown",
        "order cus_8Kd02kfL9 is unknown",
        "order 01ARZ3NDEKTSV4RRFFQ69G5FAV is unknown",
    ],
    "answer was <json>": [
        'answer was {"code": 17, "message": "no"}',
        'answer was {"error": {"code": 5, "why": ["a", "b"]}}',
        "answer was {}",
        "answer was {'a': {'b': {}}}",
    ],
    "Key (email)=(<text>) already exists.": ["Key (email)=(a@b.org) already exists.", "Key (email)=(nobody) already exists."],
    "at <time>: late": [
        "at 2026-01-31T12:00:00.5Z: late",
        "at 2026-01-31 12:00:00,123: late",
        "at 31/Jan/2026:12:00:00 +0000: late",
        "at Jan 31 12:00:00: late",
        "at 12:00:00.25: late",
        "at 2026-01-31: late",
        "at 31 Jan 2026 12:00:00 GMT: late",
    ],
    "mail to <mail> bounced": ["mail to a.b+c@example.com bounced", "mail to x@y.io bounced"],
    "cannot read <path>": ["cannot read /var/lib/x/17.csv", "cannot read C:\\Users\\x\\17.csv", "cannot read /tmp/a-b/c@d"],
    "used <n> of <n>": ["used 17 of 20", "used 1,234,567 of 1.5e9", "used 3.11.7 of 4GB", "used 85% of 512MiB"],
    "user_<n> has -<n> left": ["user_17 has -5 left", "user_3 has -12 left"],
    "ids (<n>, ...) are unknown": ["ids (1, 2, 3) are unknown", "ids (4,5) are unknown"],
    # What stays.
    "app.py:<n> in charge": ["app.py:17 in charge", "app.py:4 in charge"],
    "psycopg.errors.UniqueViolation: duplicate key": ["psycopg.errors.UniqueViolation: duplicate key"],
    "std::vector of B6 in java.io.IOException": ["std::vector of B6 in java.io.IOException"],
    "division by zero": ["division by zero", "division by zero\nat line 17", "\n division by zero"],
    "status:<n>": ["status:500", "status:404"],
}


def test_lines_of_one_cause_have_one_signature(spark: SparkSession) -> None:
    from penstock.spark.frames import normalised

    rows = [(wanted, line) for wanted, lines in LINES.items() for line in lines]
    frame = spark.createDataFrame(rows, "wanted string, line string").coalesce(1)
    found = frame.select("wanted", "line", normalised(frame["line"]).alias("got")).where("wanted != got").collect()
    assert [(row["line"], row["got"]) for row in found] == []


@pytest.mark.no_jvm
@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_the_table_of_causes_is_readable(width: int) -> None:
    console = Console(width=width, record=True, force_terminal=False)
    moment = datetime(2026, 1, 31, tzinfo=UTC)
    message = "SMTP <address> refused: " + "try later " * 8
    name, example = "send-invoice-reminders-to-customers", uuid4()
    rest = (message, example, moment, moment)
    failures = [Failure(name, "SMTPConnectError", message, "deadbeef", 12345, 999, True, *rest)]
    report.print_causes(console, failures)
    text = console.export_text()
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    # Few lines, with whole words, and all of the message.
    assert len([line for line in lines if line]) <= 8
    assert all(word in text for word in ("send-invoic", "SMTP <address>", "12,345", "999", "new")) and text.count("later") == 8
    # Where there is no room for them, the class and the example are left out; an id that is cut could not be copied.
    assert ("error" in text, "SMTPConnectError" in text, str(example) in text) == (width >= 140,) * 3
