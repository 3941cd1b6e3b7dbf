"""Child processes for work that may take too much time or memory: the protocol, and their limits."""
