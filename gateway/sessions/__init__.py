"""Sessions that clients keep under names."""
