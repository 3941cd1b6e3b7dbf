"""Ranks that compute one model together."""
