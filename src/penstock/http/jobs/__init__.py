"""Jobs and job types over HTTP."""
