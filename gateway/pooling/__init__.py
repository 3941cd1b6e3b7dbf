"""Texts as vectors and scores: models that pool, their workers, and the APIs that ask for them."""
