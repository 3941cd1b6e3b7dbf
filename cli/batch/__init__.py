"""`baton batch`: batches from the command line."""
