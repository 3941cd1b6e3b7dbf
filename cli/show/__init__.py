"""Facts about a model: `baton show`."""
