"""The front door: HTTP in, tokens out. Owns every request from admission to its last token. Never imports torch."""
