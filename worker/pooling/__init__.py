"""A worker that pools: it answers with vectors and scores, and generates nothing."""
