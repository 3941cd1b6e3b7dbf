"""The gateway process."""
