"""Families with experts behind latent attention."""
