"""Layer kinds, each a class that computes its spec, and their parts."""
