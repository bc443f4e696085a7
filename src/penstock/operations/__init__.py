"""Operations: one change of all jobs that match a filter, which workers do in batches."""
