"""`baton doctor`: problems of this installation and their fixes."""
