"""Aliases of a running gateway: `baton alias`."""
