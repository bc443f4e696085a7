"""A shop: a web application whose work happens in the background. README.md says how to run it."""
