"""Workers over HTTP, for languages without a driver."""
