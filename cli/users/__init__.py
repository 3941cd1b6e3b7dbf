"""Users of NATS and Redis: who may do what."""
