"""The models that are kept on this machine: `baton list`."""
