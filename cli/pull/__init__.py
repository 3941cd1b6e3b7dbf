"""Fetching models by name: `baton pull`."""
