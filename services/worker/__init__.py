"""A worker process with both roles."""
