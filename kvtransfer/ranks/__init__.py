"""Handing KV over between workers of several ranks, also of different widths."""
