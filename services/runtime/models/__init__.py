"""Models by name: which files they are, fetching them, and what is kept of them."""
