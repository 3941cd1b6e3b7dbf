"""Pulls: cached blocks of a prompt that a peer has, pushed by it on request instead of being computed again."""
