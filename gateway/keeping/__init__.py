"""Contents that gateways keep on NATS' disk, and the work that waits there."""
