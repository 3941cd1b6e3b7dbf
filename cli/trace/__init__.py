"""Where the time of a request went, in the terminal."""
