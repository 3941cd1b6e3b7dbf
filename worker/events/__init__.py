"""KV events in vLLM's form: routers that stand before Baton hear which blocks a worker has, and in which tier."""
