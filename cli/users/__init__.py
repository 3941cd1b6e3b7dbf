"""Users of NATS and Redis, with their permissions."""
