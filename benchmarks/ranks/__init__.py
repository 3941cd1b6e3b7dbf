"""Tensor-parallel ranks on several cards: what is right, and how long it takes."""
