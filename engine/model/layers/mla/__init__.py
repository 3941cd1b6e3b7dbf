"""Layers with multi-head latent attention (MLA), and the indexer of sparse attention."""
