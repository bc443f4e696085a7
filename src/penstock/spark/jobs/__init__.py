"""The job tables as a Spark data source: reading by commit order, writing exactly once."""
