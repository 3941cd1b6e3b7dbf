"""The common part of worker processes: the device loop, job claims, token frames, heartbeats, control messages."""
