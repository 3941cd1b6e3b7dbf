"""Who may start, who waits, and who is refused."""
