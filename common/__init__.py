"""Agreements between Baton's processes: messages, subjects, block hashes, errors, settings. Never imports torch."""

VERSION = "0.1.0"
