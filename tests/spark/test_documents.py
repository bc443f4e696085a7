"""The Python of docs/spark.md runs as it stands there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCUMENT = Path(__file__).parents[2] / "docs" / "spark.md"


def test_the_snippets_do_what_they_say(
    spark: SparkSession,
    url: str,
    ask: Callable[..., list[Any]],
    archive: Any,
    tmp_path: Path,
) -> None:
    archive(2, "t", "failed")
    archive(1)
    ask("select penstock.create_job_type('invoice')")
    ask("select penstock.declare_stream('orders', 2)")
    event = '{"customer": "acme", "total": 2.5}'
    ask("select * from penstock.append_many('orders', array[$1::text::json], '{acme}')", event)
    order = {"order_id": 7, "customer": "acme", "total": 2.5}
    (tmp_path / "orders.json").write_text(json.dumps(order))
    # The tests' session is older than this database, so its environment cannot name it.
    text = DOCUMENT.read_text().replace('.format("penstock")', f'.format("penstock").option("url", {url!r})')
    reading, following, writing, each_batch = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(reading, names)
    assert names["failed"].count() == 2
    exec(following.replace("readStream", "read"), names)
    assert [(row.key, row.customer, row.total, row.offset) for row in names["orders"].collect()] == [("acme", "acme", 2.5, 0)]
    exec(following, names)
    assert names["orders"].isStreaming
    # The name of a file is the reader's own.
    exec(writing.replace('"orders.json"', repr((tmp_path / "orders.json").as_uri())), names)
    (job,) = ask("select name, key, data::text from penstock.queued_jobs")
    assert (job["name"], job["key"], json.loads(job["data"])) == ("invoice", "acme", {"order_id": 7, "total": 2.5})
    # One number for two targets: each gets the rows, once.
    ask("select penstock.create_job_type('report')")
    exec(each_batch, names)
    for _ in range(2):
        names["put"](names["jobs"], 0)
    found = ask("select name, count(*) as jobs from penstock.queued_jobs group by name order by name")
    assert [(row["name"], row["jobs"]) for row in found] == [("invoice", 2), ("report", 1)]
