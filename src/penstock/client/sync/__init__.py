"""The asynchronous client, written by hand. `penstock.client.sync` is generated from it.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""
