"""Moving blocks between hosts by UCX."""
