"""The gateway's cost on the fake device: for a token, a request, a dialect, a trace, a long prompt."""
