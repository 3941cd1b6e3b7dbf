"""Attention over latents: all heads share one vector a token, which is key and value at once (`latent`, `triton_latent`)."""

from engine.kernels.latent.latent import latent_attention, rotate_queries, write_latents

__all__ = ["latent_attention", "rotate_queries", "write_latents"]
