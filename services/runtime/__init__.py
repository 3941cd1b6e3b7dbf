"""What the processes share: signals, connections, tracing, logging, servers as children."""
