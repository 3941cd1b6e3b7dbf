"""The owner of every request: attempts, workers' messages, and timeouts."""
