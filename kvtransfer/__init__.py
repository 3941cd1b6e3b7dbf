"""Moving KV blocks between workers: who may write where until when, what was written, and what writes it."""
