"""One script for each system that is measured, all with the same commands (see `protocol`).

Each runs in an environment of its own (see `benchmarks.environments`), with the versions in the pin file beside it.
"""
