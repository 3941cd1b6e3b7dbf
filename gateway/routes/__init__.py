"""Handlers by subject: answers in every dialect, text tools, and operators' views."""
