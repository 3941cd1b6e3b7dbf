"""Contents stored on NATS' disk, and the work queued there."""
