"""Removing models from this machine: `baton rm`."""
