"""A year of departures from New York as jobs: `make run`."""
