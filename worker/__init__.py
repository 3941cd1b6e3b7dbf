"""What the roles of a worker process share: the device loop, job claims, token frames, heartbeats, control messages."""
