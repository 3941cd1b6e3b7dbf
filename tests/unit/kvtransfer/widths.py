"""Workers of several ranks: their layouts, and blocks of the whole model cut for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from common.pages import KVLayout, PagePart, entry_places
from engine.cache.pages import layout_of
from engine.config import CacheConfig

Bytes = npt.NDArray[np.uint8]
SIZE = 4
# Parts of a page, of each kind of the families: heads (of 2: fewer than four ranks), their scales, latents, windows, states.
KEYS = PagePart(layers=2, planes=2, heads=4, dim=16, dtype="bfloat16")
CODES = PagePart(layers=2, planes=2, heads=4, dim=16, dtype="uint8")
SCALES = PagePart(layers=2, planes=2, heads=4, dim=1, dtype="float32")
INT4 = [
    PagePart(layers=3, planes=2, heads=2, dim=8, dtype="uint8"),
    PagePart(layers=3, planes=2, heads=2, dim=2, dtype="bfloat16"),
]
LATENT = PagePart(layers=3, planes=1, heads=1, dim=40, dtype="bfloat16")
WINDOWED = PagePart(layers=3, planes=2, heads=4, dim=16, dtype="bfloat16", window=6)
STATE = PagePart(layers=3, planes=1, heads=4, dim=18, dtype="float32", per_token=False)
CONVOLUTION = PagePart(layers=3, planes=3, heads=1, dim=32, dtype="bfloat16", per_token=False)
SECTIONS = (8, 8, 16)  # queries, keys and values of the convolution's channels
MODELS: dict[str, list[PagePart]] = {
    "heads": [KEYS],
    "int8": [CODES, SCALES],
    "int4, fewer heads than ranks": INT4,
    "latents": [LATENT],
    "latents and keys": [LATENT, KEYS],
    "windows": [KEYS, WINDOWED],
    "states": [KEYS, STATE, CONVOLUTION],
    "states beside two heads": [msgspec.structs.replace(KEYS, heads=2), STATE, CONVOLUTION],
    "states beside latents": [LATENT, STATE, CONVOLUTION],
    "windows and states": [msgspec.structs.replace(KEYS, heads=1), msgspec.structs.replace(WINDOWED, heads=2), STATE],
}


def ranks_of(parts: Sequence[PagePart], ranks: int, *, num_blocks: int = 40) -> list[KVLayout]:
    """The layouts of a worker's ranks."""
    cache = CacheConfig(num_blocks=num_blocks, block_size=SIZE)
    return [layout_of([share(part, rank, ranks) for part in parts], cache, 0) for rank in range(ranks)]


def stages_of(parts: Sequence[PagePart], stages: int, *, num_blocks: int = 40) -> list[KVLayout]:
    """The layouts of a worker's stages: each has some layers of all parts, the first ones one more."""
    cache = CacheConfig(num_blocks=num_blocks, block_size=SIZE)
    own = [[some_layers(part, stage, stages) for part in parts] for stage in range(stages)]
    return [layout_of(each, cache, 0, stages=own) for each in own]


def some_layers(part: PagePart, stage: int, stages: int) -> PagePart:
    if stages == 1:
        return part
    first, after = (-(-part.layers * number // stages) for number in (stage, stage + 1))
    return msgspec.structs.replace(part, layers=after - first, first_layer=first, all_layers=part.layers)


def share(part: PagePart, rank: int, ranks: int) -> PagePart:
    """Its share of the heads, a whole head where there are fewer than ranks, or its channels of each section."""
    if ranks == 1:
        return part
    if part.heads == 1 and not part.per_token:
        starts = [sum(SECTIONS[:index]) for index in range(len(SECTIONS))]
        runs = tuple(
            (start + rank * size // ranks, size // ranks) for start, size in zip(starts, SECTIONS, strict=True)
        )
        return msgspec.structs.replace(part, dim=part.dim // ranks, all_dim=part.dim, channels=runs)
    heads = max(1, part.heads // ranks)
    return msgspec.structs.replace(part, heads=heads, first_head=rank * part.heads // ranks, all_heads=part.heads)


class Model:
    """Random contents of one entry of each group."""

    def __init__(self, parts: Sequence[PagePart], seed: int = 0) -> None:
        self._parts = parts
        random = np.random.default_rng(seed)
        self._rows = [
            random.integers(
                0, 256, (part.layers, part.rows(SIZE) // part.layers, part.heads * part.head_bytes), np.uint8
            )
            for part in parts
        ]

    def entry(self, layout: KVLayout, group: int) -> Bytes:
        """The blocks [n, bytes] of an entry as a rank has it; zeros where no part is."""
        own = layout.groups[group - 1].parts if group else layout.pages
        entry = np.zeros((layout.groups[group - 1].blocks_per_entry if group else 1, layout.block_bytes), np.uint8)
        if group:
            places = entry_places(own, layout.block_bytes, SIZE)
        else:
            sizes = [part.block_bytes(SIZE) for part in own]
            places = [
                [(0, sum(sizes[:index]) + layer * size // part.layers) for layer in range(part.layers)]
                for index, (part, size) in enumerate(zip(own, sizes, strict=True))
            ]
        for part, at in zip(own, places, strict=True):
            rows_by_layer = self._rows[self._index(part)][part.first_layer :][: part.layers]
            for rows, (number, first) in zip(rows_by_layer, at, strict=True):
                cut = np.concatenate([rows[:, begin : begin + size] for begin, size in part.kept], axis=1).reshape(-1)
                entry[number, first : first + len(cut)] = cut
        return entry

    def _index(self, part: PagePart) -> int:
        return next(index for index, one in enumerate(self._parts) if one.whole == part.whole)
