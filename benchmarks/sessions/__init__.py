"""Agents' sessions against a Baton with and without a host tier of its KV cache."""
