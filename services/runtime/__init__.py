"""Code that services share: settings, signals, connections, tracing, logging, and servers as children."""
