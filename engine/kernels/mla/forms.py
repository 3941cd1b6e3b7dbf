"""The two forms of MLA for a prompt, and the cost model that picks one.

Absorbed: queries are projected into the latent space and attend to the latents, as in decoding (MQA). Up-projected: each head's
keys and values are computed from the latents first (MHA).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.attention.split import LARGE_TILE, SMALL_TILE, Tiling
from engine.kernels.device import Device

# Multiply-adds a byte of memory traffic (the roofline's ridge) with 16-bit operands: H200 100, A100 80, B200 140.
PER_BYTE_ON_GPUS = 100
PER_BYTE_ON_CPUS = 5
# Scratch space in bytes for gathered latents and up-projected keys and values.
ROOM_ON_GPUS = 256 << 20
ROOM_ON_CPUS = 32 << 20
COPIED_BYTES = 16  # alignment of bulk copies
ROWS = 64  # queries of all heads in a program of the absorbed form
# Largest non-rotated, rotated and value sizes of a head that `triton_up_projected` supports.
MOST = (256, 64, 256)
# Query tiles of the up-projected form.
UP_PROJECTED_TILING = Tiling(SMALL_TILE, LARGE_TILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAShape:
    """The sizes that both forms' cost depends on."""

    num_heads: int  # H
    rank: int  # C, size of the latents (kv_lora_rank)
    plain: int  # N, features of a key that are up-projected (qk_nope_head_dim)
    rotated: int  # R, features of a key that all heads share (qk_rope_head_dim)
    value: int  # V
    itemsize: int  # b, bytes of a number
    most: int = 0  # positions that a query attends to; 0: all

    @property
    def made(self) -> int:
        """The elements that one position's latents are up-projected to."""
        return self.num_heads * (self.plain + self.value)

    @property
    def position_bytes(self) -> int:
        """Return the bytes of a position while its keys and values are up-projected."""
        return self.itemsize * (self.made + self.rank + self.rotated)

    @property
    def token_bytes(self) -> int:
        """Return the temporary bytes of a new token: its queries before and after they are rotated, its output, a float32 state.

        Where positions are chosen, long prompts are absorbed: their queries among the latents, what they find, and the choice.
        """
        numbers = 2 * (self.plain + self.rotated) + self.value
        if self.most:
            numbers += 2 * self.rank
        return self.num_heads * (self.itemsize * numbers + 4 * (self.value + 2)) + 4 * self.most


def forms_on(device: torch.device, shape: MLAShape) -> Forms:
    """The forms of a model with these sizes."""
    if device.type == "cpu":
        return Forms(shape=shape, per_byte=PER_BYTE_ON_CPUS, room=ROOM_ON_CPUS)
    return Forms(shape=shape, per_byte=PER_BYTE_ON_GPUS, room=ROOM_ON_GPUS)


def mla_items_at_once(device: Device, num_heads: int) -> int:
    """Items of decoding sequences that run concurrently: a program's registers leave no room for a second one."""
    return max(1, device.processors // -(-num_heads // ROWS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """The forms of a model's prompts on a device."""

    shape: MLAShape
    per_byte: int
    room: int  # bytes

    def makes(self, new: int, context: int) -> bool:
        """True if `new` tokens at the end of `context` positions, theirs included, are up-projected.

        With T new tokens, S positions, P = T S - T (T - 1) / 2 pairs of a token and a position that it sees, w multiplications
        a byte, and the letters of `MLAShape`, the costs are

            made      H (S C (N + V) + P (N + R + V)) + 2 w b S (H (N + V) + C + R)
            absorbed  H (T C (N + V) + P (2 C + R)) + 2 w b T H (2 C + R)

        Making a position's keys and values takes as much as absorbing a query and turning what it found into values. Both write
        what they made and read it again. With DeepSeek-V2-Lite's sizes on a GPU, chunks of fewer than about 310 tokens behind
        30,000 cached ones are absorbed, and all prompts without cached tokens are made. Those are absorbed whose last tokens
        see more than they attend to: each attends to others.
        """
        its = self.shape
        if its.most and context > its.most:
            return False
        sizes = zip((its.plain, its.rotated, its.value), MOST, strict=True)
        if any(size > most or size * its.itemsize % COPIED_BYTES for size, most in sizes):
            return False
        pairs = new * context - new * (new - 1) // 2
        heads, out_of_latents, moved = (
            its.num_heads,
            its.rank * (its.plain + its.value),
            2 * self.per_byte * its.itemsize,
        )
        found = 2 * its.rank + its.rotated
        made = heads * (context * out_of_latents + pairs * (its.plain + its.rotated + its.value))
        made += moved * context * (its.made + its.rank + its.rotated)
        absorbed = heads * (new * (out_of_latents + moved * found) + pairs * found)
        return made < absorbed

    def positions(self, block_size: int) -> int:
        """The most positions of a piece of contexts, in whole blocks: at least one."""
        return max(1, self.room // (self.shape.position_bytes * block_size)) * block_size
