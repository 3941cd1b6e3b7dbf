"""KV on its way from a prefill to a decode worker: through the gateway's HTTP, and by a transport alone."""
