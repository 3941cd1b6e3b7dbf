"""A request as data: what was asked, its state, its time line."""
