"""Vectors of the texts in a file: `baton embed FILE`."""
