"""Agreements between Baton's processes: messages, subjects, block hashes, errors, settings. Never imports torch."""

VERSION = "0.1.0"
PREFIX = "BATON_"  # the variables of settings begin with it
