"""A chat in the terminal."""
