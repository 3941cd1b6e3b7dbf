"""The time of one request, part by part, in the terminal."""
