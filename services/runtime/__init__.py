"""The common part of processes: signals, connections, tracing, logging, servers as children."""
