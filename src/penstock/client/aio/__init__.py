"""The asynchronous client, written by hand. `penstock.client.sync` is generated from it."""
