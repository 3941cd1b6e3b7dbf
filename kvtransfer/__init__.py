"""Moving KV blocks between workers: leases, verification, and transports."""
