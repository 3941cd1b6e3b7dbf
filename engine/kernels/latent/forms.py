"""Two forms of a prompt's attention over latents, and which of them costs less.

Absorbed: queries are taken among the latents. Made: each head's keys and values are made of the latents first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.attention.tiles import LARGE_TILE, SMALL_TILE, Tiling
from engine.kernels.device import Device

# Multiplications (and additions) in the time in which a byte comes from memory, or goes there.
# Of 16-bit numbers an H200 makes 100, an A100 80, a B200 140.
PER_BYTE_ON_GPUS = 100
PER_BYTE_ON_CPUS = 5
# Bytes of latents, keys and values that are there at once.
ROOM_ON_GPUS = 256 << 20
ROOM_ON_CPUS = 32 << 20
COPIED_BYTES = 16  # all bulk copies begin at multiples
ROWS = 64  # queries of all heads in a program of the absorbed form
# Plain, rotated and value features of a head that `triton_made` has room for.
MOST = (256, 64, 256)
# How the queries are cut whose keys and values are made.
MADE_TILING = Tiling(SMALL_TILE, LARGE_TILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """The sizes that both forms' cost depends on."""

    num_heads: int  # H
    rank: int  # C, size of the latents
    plain: int  # N, features of a key that are made of latents
    rotated: int  # R, features of a key that all heads share
    value: int  # V
    itemsize: int  # b, bytes of a number
    most: int = 0  # positions that a query attends to; 0: all

    @property
    def made(self) -> int:
        """Numbers that are made of a position's latents."""
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


def forms_on(device: torch.device, shape: LatentShape) -> Forms:
    """The forms of a model with these sizes."""
    if device.type == "cpu":
        return Forms(shape=shape, per_byte=PER_BYTE_ON_CPUS, room=ROOM_ON_CPUS)
    return Forms(shape=shape, per_byte=PER_BYTE_ON_GPUS, room=ROOM_ON_GPUS)


def latent_items_at_once(device: Device, num_heads: int) -> int:
    """Items of decoding sequences that the device computes at once. A program's registers leave no room for a second one."""
    return max(1, device.processors // -(-num_heads // ROWS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """How a model's prompts attend to latents on a device."""

    shape: LatentShape
    per_byte: int
    room: int  # bytes

    def makes(self, new: int, context: int) -> bool:
        """Whether keys and values are made for `new` tokens at the end of `context` positions, theirs included.

        With T new tokens, S positions, P = T S - T (T - 1) / 2 pairs of a token and a position that it sees, w multiplications
        a byte, and the letters of `LatentShape`, the costs are

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
