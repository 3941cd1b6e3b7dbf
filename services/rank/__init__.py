"""A further rank of a worker, which the first one starts."""
