"""Jobs as a Spark data source: reading in commit order, writing exactly once."""
