"""The steps of the pipeline, and the graph of a day. Drivers of Spark import this module, as workers do."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.flights.data import flights
from penstock import Penstock, Workflow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

app = Penstock()
SMALL = {"spark.driver.memory": "600m", "spark.sql.shuffle.partitions": "2"}


@app.job("extract-day", keep_result=True)
def extract_day(day: str, folder: str) -> dict[str, Any]:
    """Write the flights of a day to a file, which the steps behind it read."""
    rows = [asdict(flight) for flight in flights() if flight.day == day]
    path = Path(folder, f"flights-{day}.json")
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"file": str(path), "rows": len(rows)}


@app.spark_job("rate-carriers", master="local[2]", config=SMALL, keep_result=True)
def rate_carriers(spark: SparkSession, day: str, flights: dict[str, Any]) -> int:
    """Enqueue a job for each carrier with the mean delay of its flights. A retry enqueues none twice."""
    from pyspark.sql import functions as F

    rated = (
        spark.read.json(flights["file"]).groupBy("carrier").agg(F.avg("dep_delay").alias("delay"), F.count("*").alias("flights"))
    )
    jobs = rated.select(F.struct(F.lit(day).alias("day"), "carrier", F.round("delay", 1).alias("delay"), "flights").alias("data"))
    jobs.write.format("penstock").option("job", "tell-carrier").mode("append").save()
    return rated.count()


@app.spark_job("keep-routes", master="local[2]", config=SMALL, keep_result=True)
def keep_routes(spark: SparkSession, flights: dict[str, Any], folder: str) -> str:
    """Write the flights of each route to Parquet."""
    target = f"{folder}/routes.parquet"
    spark.read.json(flights["file"]).groupBy("origin", "dest").count().write.mode("overwrite").parquet(target)
    return target


@app.job("tell-carrier")
def tell_carrier(day: str, carrier: str, flights: int, delay: float | None = None) -> None:
    """Tell a carrier how late its flights were."""
    print(f"{carrier}: {flights} flights on {day}, {delay} minutes late on average")


@app.job("publish-day", keep_result=True)
def publish_day(day: str, rows: dict[str, Any], carriers: int, routes: str) -> str:
    """Say what there is of a day."""
    return f"{day}: {rows['rows']} flights of {carriers} carriers, routes in {routes}"


def nightly(day: str, folder: Path) -> Workflow:
    """The graph of a day: the two Spark steps run when the flights are there, and what they return is published."""
    graph = app.workflow("nightly")
    rows = graph.add(extract_day, day, str(folder))
    carriers = graph.add(rate_carriers, day, rows.result, after=rows)
    routes = graph.add(keep_routes, rows.result, str(folder), after=rows)
    graph.add(publish_day, day, rows.result, carriers.result, routes.result, after=[carriers, routes])
    return graph
