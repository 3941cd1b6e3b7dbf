"""`baton doctor`: what is wrong with this installation and how to mend it."""
