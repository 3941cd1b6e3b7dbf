"""What the gateway costs: see `__main__`."""
