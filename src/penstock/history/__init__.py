"""History: the archive in commit order, and the lake of Parquet and Delta files that it fills."""
