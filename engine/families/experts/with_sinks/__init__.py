"""Families with experts whose windows have attention sinks."""
