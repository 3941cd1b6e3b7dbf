"""Answers without servers: one engine in one process, for `baton run-batch` and the class `LLM`."""
