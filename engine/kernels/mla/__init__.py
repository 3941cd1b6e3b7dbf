"""Multi-head latent attention (MLA): all heads share one compressed KV vector a token, the latents.

`forms` decides for each prompt: the latents are key and value at once (`absorbed`, `triton_absorbed`), or each head's keys and
values are up-projected from them (`up_projected`, `triton_up_projected`).
"""

from engine.kernels.mla.absorbed import Latents, mla_attention, opened, rotate, rotate_queries, write_latents
from engine.kernels.mla.forms import ROOM_ON_GPUS, UP_PROJECTED_TILING, Forms, MLAShape, forms_on, mla_items_at_once
from engine.kernels.mla.up_projected import up_projected_attention

__all__ = [
    "ROOM_ON_GPUS",
    "UP_PROJECTED_TILING",
    "Forms",
    "Latents",
    "MLAShape",
    "forms_on",
    "mla_attention",
    "mla_items_at_once",
    "opened",
    "rotate",
    "rotate_queries",
    "up_projected_attention",
    "write_latents",
]
