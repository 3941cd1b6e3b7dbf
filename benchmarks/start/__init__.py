"""Starts: of Baton until its first token, and of each command."""
