"""What the processes of Baton must agree on: messages, subjects, block hashes, errors, settings. Never imports torch."""

VERSION = "0.1.0"
