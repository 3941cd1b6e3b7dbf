"""Layers whose heads share latents, and what chooses the positions that they attend to."""
