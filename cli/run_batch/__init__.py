"""A file of requests answered here: `baton run-batch`."""
