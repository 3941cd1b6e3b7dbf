"""A worker that pools: embeddings, and scores of pairs and labels."""
