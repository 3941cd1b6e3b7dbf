"""The memory behind block ids: contents of a block, number of blocks, and the pool's tensors."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from common.pages import LANE_BYTES, KVGroup, KVLayout, PagePart, Places, entry_places
from common.words import Keeps
from engine.config import CacheConfig, EngineConfig
from engine.groups import group_of
from engine.kernels.attention import KeptWindow
from engine.kernels.delta.plan import KeptState
from engine.kernels.mla import ROOM_ON_GPUS
from engine.spec.mla import MLASpec
from engine.spec.model import ModelSpec
from engine.step.graphs import graph_sizes

DEFAULT_CPU_BYTES = 256 << 20
MOST_CPU_BYTES = 1 << 30  # largest pool that grows to hold one whole context
CPU_SHARE = 4  # a pool grows to a quarter of the free memory
SHARED_MEMORY = Path("/dev/shm")
DEFAULT_BLOCK_SIZE = 16  # token positions
MAX_BLOCK_SIZE = 1024  # a layer's state must fit into a block
MAX_STATE_WASTE = 0.25  # share by which a state's blocks may exceed its bytes
GPU_HEADROOM = 0.06  # memory share for graphs, library workspaces and fragmentation
LOADING_HEADROOM = 0.01  # the same before graphs are captured


def page_parts(model: ModelSpec, dtype: str) -> list[PagePart]:
    """Return one part for each kind of content: of all tokens first, then of sliding windows, then of states.

    A stage has each of them, with the layers that are its own.
    """
    parts = _parts(model, dtype)
    return parts if model.stage is None else _within(model, parts, model.stage.layers)


def parts_of_stages(model: ModelSpec, dtype: str) -> list[list[PagePart]]:
    """Return the parts of each stage, nothing for a single one."""
    return [_within(model, _parts(model, dtype), layers) for layers in model.stage.ranges] if model.stage else []


def _within(model: ModelSpec, parts: Sequence[PagePart], layers: range) -> list[PagePart]:
    before, own = model.kept_within(range(layers.start)), model.kept_within(layers)
    return [
        msgspec.structs.replace(part, layers=own[kept], first_layer=before[kept], all_layers=part.layers)
        for kept, part in zip(model.kept, parts, strict=True)
    ]


def _parts(model: ModelSpec, dtype: str) -> list[PagePart]:
    return [
        PagePart(
            layers=layers,
            planes=kept.planes,
            heads=kept.heads,
            dim=kept.dim,
            dtype=kept.dtype or dtype,
            per_token=kept.per_token,
            window=kept.window,
            first_head=kept.first_head,
            all_heads=kept.all_heads,
        )
        for kept, layers in model.kept.items()
    ]


def plan_layout(
    model: ModelSpec, config: EngineConfig, dtype: str, while_loading: int = 0, longest: int = 0, held_back: int = 0
) -> KVLayout:
    """Return the pool's layout: `num_blocks` of `config.cache`, or as many as fit into its `kv_memory_bytes`.

    With neither, on a CPU: 256 MiB, or more for one sequence of `longest` tokens where memory is free. On a GPU: as many as
    fit into what weights and a pass leave, or their loading, which takes `while_loading` bytes before there are passes, but for
    `held_back` bytes: a pool has as many blocks on every rank.
    Raises ValueError when no block fits.
    """
    cache, memory, parts = config.cache, config.cache.kv_memory_bytes, page_parts(model, dtype)
    stages = parts_of_stages(model, dtype)
    if memory is None and cache.num_blocks is None:
        if config.device == "cpu":
            memory = _cpu_bytes(layout_of(parts, cache, DEFAULT_CPU_BYTES, stages=stages), longest)
        else:
            memory = _free_bytes(model, config, while_loading) - held_back
    return layout_of(parts, cache, memory or 0, max_model_len=config.max_model_len, stages=stages)


def blocks_of_a_sequence(layout: KVLayout, num_tokens: int) -> int:
    """Return the fewest blocks of a pool that holds one sequence of so many tokens."""
    return -(-num_tokens // layout.block_size) + layout.blocks_beside(num_tokens)


def _cpu_bytes(layout: KVLayout, longest: int) -> int:
    """Size of a CPU's pool; `layout` is the default's."""
    whole = blocks_of_a_sequence(layout, longest) * layout.block_bytes
    return max(DEFAULT_CPU_BYTES, min(whole, MOST_CPU_BYTES, _free_memory() // CPU_SHARE))


def _free_memory() -> int:
    """Free memory, and free shared memory, where a pool may be; 0 if unknown."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(free, shutil.disk_usage(SHARED_MEMORY).free)
    except (OSError, ValueError):
        return 0


def layout_of(
    parts: Sequence[PagePart],
    cache: CacheConfig,
    memory: int,
    *,
    max_model_len: int | None = None,
    stages: Sequence[Sequence[PagePart]] = (),
) -> KVLayout:
    """Return a layout of `cache.num_blocks` blocks with these parts, or of as many as fit into `memory` bytes.

    `stages`: the parts of all stages. An entry has as many blocks as in the one that needs most, and blocks of tokens have a
    size that suits all of them, since ids are the same in all.

    Raises ValueError when no block fits, not a state with a block of tokens, or the wanted context is less than a block.
    """
    stages = stages or [parts]
    size = cache.block_size or block_size(stages)
    if max_model_len is not None and max_model_len < size:
        raise ValueError(
            f"max_model_len = {max_model_len} is less than a block of {size} positions: give a longer --max-model-len"
            " or a smaller --block-size"
        )
    tokens = _kept_for_ever(parts)
    block_bytes = _bytes(tokens, size)
    groups = _groups(parts, stages, size)
    num_blocks = cache.num_blocks or memory // block_bytes
    if num_blocks <= 0:
        raise ValueError(
            f"{max(memory, 0)} bytes of memory for KV are less than one block of {block_bytes} bytes: give more --kv-memory-mb,"
            " or on a GPU fewer --max-batch-tokens, or weights of fewer bits (--quantization)"
        )
    if num_blocks <= (beside := sum(group.blocks_per_entry for group in groups)):
        raise ValueError(f"{num_blocks} blocks for KV hold no sequence: beside a block of tokens it has {beside} more")
    layout = KVLayout.of(tokens, num_blocks=num_blocks, block_size=size)
    return msgspec.structs.replace(layout, parts=tuple(tokens), groups=groups) if groups else layout


def keeps(part: PagePart) -> Keeps:
    """The kind of group that a part is in."""
    if not part.per_token:
        return Keeps.STATE
    return Keeps.WINDOW if part.window else Keeps.ALL


def _groups(parts: Sequence[PagePart], stages: Sequence[Sequence[PagePart]], size: int) -> tuple[KVGroup, ...]:
    """The groups besides that of blocks of tokens. Raises ValueError where a layer's share of an entry is more than a block."""
    groups = []
    for kind in dict.fromkeys(keeps(part) for part in parts):
        if kind is Keeps.ALL:
            continue
        own = [part for part in parts if keeps(part) is kind]
        if not (num_blocks := blocks_of_an_entry(stages, kind, size)):
            raise ValueError(_too_large(stages, kind, size))
        window = max(part.window for part in own)
        group = KVGroup(keeps=kind, parts=tuple(own), blocks_per_entry=num_blocks, window=window)
        groups.append(msgspec.structs.replace(group, most_entries=group_of(group, size).most))
    return tuple(groups)


def blocks_of_an_entry(stages: Sequence[Sequence[PagePart]], kind: Keeps, size: int) -> int:
    """Return the blocks of an entry of this group, as many as the stage with most needs; 0: a layer's share exceeds a block."""
    most = 0
    for parts in stages:
        own = [part for part in parts if keeps(part) is kind]
        if not (places := entry_places(own, _bytes(_kept_for_ever(parts), size), size)):
            return 0
        most = max(most, _num_blocks(places))
    return most


def last_block(model: ModelSpec, dtype: str, size: int) -> int | None:
    """The block of a window's entry that has the last attending layer in the last stage; None if blocks of tokens have it."""
    kept = next(layer for layer in reversed(model.layers) if layer.attention is not None).kept
    if not kept or not kept[0].window:
        return None
    return blocks_of_an_entry(parts_of_stages(model, dtype)[-1:], Keeps.WINDOW, size) - 1  # layers follow one another


def _too_large(stages: Sequence[Sequence[PagePart]], kind: Keeps, size: int) -> str:
    """Reason for which no block has room for a layer's share, and the remedy."""
    block_bytes = min(_bytes(_kept_for_ever(parts), size) for parts in stages)
    wanted = next((more for more in _sizes() if blocks_of_an_entry(stages, kind, more)), None)
    what = "a layer's state" if kind is Keeps.STATE else "a layer with a window keeps in one"
    remedy = f"give it block_size = {wanted} or more" if wanted else "no size of blocks will do"
    return f"a block of {size} tokens has {block_bytes} bytes, less than {what}: {remedy}"


def block_size(stages: Sequence[Sequence[PagePart]]) -> int:
    """Return 16, or with states the smallest size whose blocks waste little of a state, else the least wasteful.

    `stages`: their parts; what all of them waste counts.
    """
    needed = sum(part.block_bytes(1) for parts in stages for part in parts if not part.per_token)
    if not needed:
        return DEFAULT_BLOCK_SIZE
    wasted = {}
    for size in _sizes():
        block_bytes = sum(_bytes(_kept_for_ever(parts), size) for parts in stages)
        if num := blocks_of_an_entry(stages, Keeps.STATE, size):
            wasted[size] = num * block_bytes - needed
            if wasted[size] <= MAX_STATE_WASTE * needed:
                return size
    return min(wasted, key=lambda size: wasted[size], default=MAX_BLOCK_SIZE)


def _kept_for_ever(parts: Sequence[PagePart]) -> list[PagePart]:
    """Parts that are in each block of tokens."""
    return [part for part in parts if part.per_token and not part.window]


def _num_blocks(places: Places) -> int:
    return max((number + 1 for part in places for number, _ in part), default=0)


def _bytes(parts: Sequence[PagePart], block_size: int) -> int:
    return sum(part.block_bytes(block_size) for part in parts)


def _sizes() -> list[int]:
    return [DEFAULT_BLOCK_SIZE << step for step in range((MAX_BLOCK_SIZE // DEFAULT_BLOCK_SIZE).bit_length())]


def _free_bytes(model: ModelSpec, config: EngineConfig, while_loading: int) -> int:
    free, total = torch.cuda.mem_get_info(config.device)
    of_passes = bytes_of_passes(model, config) + int(GPU_HEADROOM * total)
    return free - max(of_passes, while_loading + int(LOADING_HEADROOM * total))


def bytes_of_passes(model: ModelSpec, config: EngineConfig) -> int:
    """Return what passes on a GPU need beside weights and pool, without the headroom."""
    # Peak activations of a pass: the MLP's input, both halves and their product, or up-projected attention; and the logits,
    # twice, in float32.
    mixers = (mixer for mixer in model.attentions if isinstance(mixer, MLASpec))
    latent_bytes = [mixer.shape(2).token_bytes for mixer in mixers]
    aux_bytes = 2 * model.hidden_size * _aux_states(model)
    token_bytes = 2 * 4 * model.hidden_size + max(2 * 3 * model.widest_mlp, *latent_bytes, 0) + aux_bytes
    logits_bytes = 8 * model.vocab_size * min(config.max_sequences, config.max_batch_tokens)
    made_bytes = (ROOM_ON_GPUS if latent_bytes else 0) + _drafting_bytes(model, config)
    return config.max_batch_tokens * token_bytes + logits_bytes + made_bytes


def _aux_states(model: ModelSpec) -> int:
    """The hidden states of a token for a drafter. A first stage has those of all passes in flight, as they come and joined."""
    if model.draft is None:
        return 0
    held = 2 + len(model.stage.ranges) if model.stage is not None and model.own_draft is not None else 1
    return held * (len(model.draft.aux_layers) + model.draft.reads_output)


def _drafting_bytes(model: ModelSpec, config: EngineConfig) -> int:
    """The graphs of guesses: the rows that each reads, and the logits of the largest, twice, in float32."""
    if model.own_draft is None or config.draft is None or not (num_drafts := config.draft.num_drafts):
        return 0
    counts = [size.decoding for size in graph_sizes(config.max_sequences, longest=0)]
    rows = max(counts) * (model.own_draft.at_most(num_drafts) if model.own_draft.in_blocks else 1)
    read = 1 + len(model.own_draft.aux_layers) + model.own_draft.reads_output
    return sum(counts) * 2 * read * model.hidden_size + rows * 8 * model.vocab_size


def pool_shape(layout: KVLayout) -> tuple[int, ...]:
    """Return `[num_blocks, layers, planes, slots, heads, dim]` for one part, `[num_blocks, bytes]` for several.

    Raises ValueError unless a block is a whole number of 32-bit lanes, the unit of digests and copies.
    """
    for part in layout.pages:
        if part.block_bytes(layout.block_size) % LANE_BYTES:
            raise ValueError(f"a part of {part.block_bytes(layout.block_size)} bytes is no multiple of {LANE_BYTES}")
    if len(layout.pages) > 1:
        return (layout.num_blocks, layout.block_bytes)
    (part,) = layout.pages
    return (layout.num_blocks, *_part_shape(part, layout.block_size))


def pool_dtype(layout: KVLayout) -> torch.dtype:
    """Return the part's dtype, bytes for several parts."""
    return torch_dtype(layout.pages[0].dtype) if len(layout.pages) == 1 else torch.uint8


def part_views(pool: torch.Tensor, layout: KVLayout) -> list[torch.Tensor]:
    """View the pool as one tensor for each part, [num_blocks, layers, planes, slots, heads, dim] in the part's dtype."""
    if len(layout.pages) == 1:
        return [pool]
    views, start = [], 0
    for part in layout.pages:
        size = part.block_bytes(layout.block_size)
        own = pool[:, start : start + size].view(torch_dtype(part.dtype))
        views.append(own.unflatten(1, _part_shape(part, layout.block_size)))
        start += size
    return views


def entry_views(pool: torch.Tensor, layout: KVLayout) -> list[list[KeptWindow] | list[KeptState]]:
    """View what each layer keeps in entries of the further groups, by part and layer."""
    lanes, size = pool.flatten(1).view(torch.uint8), layout.block_size
    views: list[list[KeptWindow] | list[KeptState]] = []
    for group in layout.groups:
        for part, places in zip(group.parts, entry_places(group.parts, layout.block_bytes, size), strict=True):
            num_bytes, shape = (
                part.block_bytes(size) // max(1, part.layers),
                (part.planes, part.slots(size), part.heads, part.dim),
            )
            found = [
                (number, lanes[:, first : first + num_bytes].view(torch_dtype(part.dtype)).unflatten(1, shape))
                for number, first in places
            ]
            views.append(
                [KeptWindow(*each) for each in found] if part.per_token else [KeptState(*each) for each in found]
            )
    return views


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a page part's name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return memory that no peer can reach, for a single process. Raises MemoryError."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Zero pages take memory only once written, so unused blocks cost nothing. An allocator would reuse memory, and fill it with
    # zeros.
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {size >> 20} MiB of keys and values: lower --kv-memory-mb ({error})") from error
    with contextlib.suppress(AttributeError, OSError):  # not on all systems
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _part_shape(part: PagePart, block_size: int) -> tuple[int, ...]:
    return (part.layers, part.planes, part.slots(block_size), part.heads, part.dim)
