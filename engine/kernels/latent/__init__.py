"""Attention over latents: all heads share one vector a token.

`forms` decides for each prompt: the vector is key and value at once (`latent`, `triton_latent`), or keys and values are made of
it (`made`, `triton_made`).
"""

from engine.kernels.latent.forms import MADE_TILING, ROOM_ON_GPUS, Forms, LatentShape, forms_on, latent_items_at_once
from engine.kernels.latent.latent import Latents, latent_attention, opened, rotate_queries, turned, write_latents
from engine.kernels.latent.made import made_attention

__all__ = [
    "MADE_TILING",
    "ROOM_ON_GPUS",
    "Forms",
    "LatentShape",
    "Latents",
    "forms_on",
    "latent_attention",
    "latent_items_at_once",
    "made_attention",
    "opened",
    "rotate_queries",
    "turned",
    "write_latents",
]
