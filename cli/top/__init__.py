"""`baton top`: the workers, live in the terminal."""
