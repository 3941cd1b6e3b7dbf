"""Parsing of a model's output into a message: content, reasoning and tool calls, by tables of formats."""
