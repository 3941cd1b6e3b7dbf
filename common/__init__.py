"""What the processes of Baton must agree on: wire messages, subjects, block hashes, errors, settings. Never imports torch."""
