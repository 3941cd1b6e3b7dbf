"""A request as data: its specification, its state, its timeline."""
