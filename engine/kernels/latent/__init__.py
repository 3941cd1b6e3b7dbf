"""Attention over latents: all heads share one vector a token, which is key and value at once (`latent`, `triton_latent`)."""

from engine.kernels.latent.latent import Latents, latent_attention, opened, rotate_queries, write_latents

__all__ = ["Latents", "latent_attention", "opened", "rotate_queries", "write_latents"]
