"""Warm-up passes before the first request, which compile or load kernels.

Kernels are compiled by shape: few rows or many, with or without a cached prefix, short or long contexts, prompts beside
decoding, each way to sample. One pass of each kind runs on unused blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as ListOf

from common.messages import Grammar, KVLayout, SamplingParams
from engine.batch.layout import GraphSize
from engine.groups import Table, entries_of, extend, groups_of
from engine.passes import Pass
from engine.sequence import Chunk, Sequence
from engine.step.graphs import PROMPT_GRAPHS

PROMPT_TOKENS = (8, 24, 48, 100, 300, 1500, 3000)  # between these are the thresholds that select kernels
TIMED_PROMPTS = (256, 512, 1024, 2048, 8192)  # tokens of a pass with one prompt alone
LAUNCHES = 3  # a host that was idle takes twice as long at first
LAUNCHED_TOKENS = 1024  # tokens of two prompts: more than a graph holds
# Tokens of the prompts that say which of the long graphs are worth it, and the part of a pass for which the device may
# compute on when all is launched: with more of it, it was not the host that took so long.
LONG_STEPS = (1024, 2048)
WAITED = 0.25
CACHED_TOKENS = (32, 500, 2500)  # positions before a chunk
CHUNK_TOKENS = (24, 300)  # tokens of a chunk after them
SAMPLINGS = (
    SamplingParams(max_tokens=4, temperature=0.0),
    SamplingParams(max_tokens=4, temperature=0.8, seed=1),
    SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=1),
    SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=1, logprobs=5),
    SamplingParams(max_tokens=4, temperature=0.8, typical_p=0.9, seed=1),
    SamplingParams(max_tokens=4, temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(max_tokens=4, temperature=0.0, logit_bias={1: 1.0}, stop_token_ids=[2], min_tokens=2),
)

ANYTHING = Grammar(text=r"start: /(.|\n)*/")


def warm_up(
    launch: Callable[[list[Chunk]], Pass], layout: KVLayout, *, vocab_size: int, max_model_len: int, max_tokens: int
) -> None:
    """Run a pass of each kind that fits `max_tokens`, a sequence's limit and the pool; wait for each."""
    room = min(max_model_len, _tokens_in(layout) // 2)

    def sequence(num_tokens: int, sampling: SamplingParams = SAMPLINGS[0], *, first_block: int = 0) -> Sequence:
        return _sequence(num_tokens, sampling, layout, vocab_size, first_block)

    for num_tokens in PROMPT_TOKENS:
        if num_tokens <= max_tokens and num_tokens + 2 <= room:
            launch([sequence(num_tokens).schedule(num_tokens)]).wait()
    for before in CACHED_TOKENS:
        for num_tokens in CHUNK_TOKENS:
            if before + num_tokens + 2 <= room and num_tokens < max_tokens:
                continued = sequence(before + num_tokens)
                continued.restart(before)
                launch([continued.schedule(num_tokens)]).wait()
    if room < 40 or max_tokens < 40:
        return
    for sampling in SAMPLINGS:
        decoding, prompt = sequence(12, sampling), sequence(24, sampling, first_block=layout.num_blocks // 2)
        launch([decoding.schedule(12)]).wait()
        launch([decoding.schedule(1), prompt.schedule(24)]).wait()
    masked = sequence(12)
    masked.grammar = ANYTHING
    launch([masked.schedule(12)]).wait()


def time_prompts(
    launch: Callable[[list[Chunk]], Pass], layout: KVLayout, *, vocab_size: int, max_tokens: int
) -> dict[int, float]:
    """Milliseconds of a pass with one prompt alone, by its tokens: placement's first estimates."""
    times = {}
    room = min(max_tokens, _tokens_in(layout))
    for num_tokens in (tokens for tokens in TIMED_PROMPTS if tokens <= room):
        times[num_tokens] = _timed(launch, layout, vocab_size, num_tokens)[1]
    return times


def time_launch(launch: Callable[[list[Chunk]], Pass], layout: KVLayout, *, vocab_size: int, max_tokens: int) -> float:
    """Milliseconds that the host takes to launch a pass kernel by kernel; 0 if prompts are too short for that."""
    if min(max_tokens, _tokens_in(layout)) < LAUNCHED_TOKENS:
        return 0.0
    return min(_timed(launch, layout, vocab_size, *[LAUNCHED_TOKENS // 2] * 2)[0] for _ in range(LAUNCHES))


def worth_capturing(
    sizes: ListOf[GraphSize],
    launch: Callable[[list[Chunk]], Pass],
    layout: KVLayout,
    *,
    vocab_size: int,
    exchange: Callable[[bytes], ListOf[bytes]],
) -> list[GraphSize]:
    """Return the sizes whose passes the host takes about as long to launch as the device to compute.

    These are all but some of the long prompts. `exchange`: of `Ranks`, which all capture the same.
    """
    longest = PROMPT_GRAPHS[-1]
    for tokens in LONG_STEPS:
        if GraphSize(0, tokens) in sizes and tokens <= _tokens_in(layout):
            launched, over = _timed(launch, layout, vocab_size, tokens)
            longest = tokens if over - launched <= WAITED * over else longest
    agreed = min(int.from_bytes(one, "little") for one in exchange(longest.to_bytes(4, "little")))
    return [size for size in sizes if size.decoding or size.prompts <= agreed]


def _timed(
    launch: Callable[[list[Chunk]], Pass], layout: KVLayout, vocab_size: int, *prompts: int
) -> tuple[float, float]:
    """Milliseconds until a pass of prompts of so many tokens was launched, and until it was over.

    That is a second run's: the first may be cold.
    """
    launched, over, blocks = 0.0, 0.0, layout.num_blocks // len(prompts)
    for _ in range(2):
        chunks = [
            _sequence(tokens, SAMPLINGS[0], layout, vocab_size, at * blocks, more=0).schedule(tokens)
            for at, tokens in enumerate(prompts)
        ]
        began = time.perf_counter()
        running = launch(chunks)
        launched = 1000 * (time.perf_counter() - began)
        running.wait()
        over = 1000 * (time.perf_counter() - began)
    return launched, over


def _tokens_in(layout: KVLayout) -> int:
    """Return the tokens of one sequence whose entries all stay."""
    growth = sum(group.blocks for group in groups_of(layout) if group.grows)
    return layout.num_blocks // growth * layout.block_size


def _sequence(
    num_tokens: int, sampling: SamplingParams, layout: KVLayout, vocab_size: int, first_block: int, *, more: int = 2
) -> Sequence:
    """A sequence with blocks for its tokens and `more`. All share one state, whose contents are ignored."""
    num_blocks = -(-(num_tokens + more) // layout.block_size)
    return Sequence(
        request_id="warm-up",
        attempt=1,
        token_ids=[index % vocab_size for index in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling=sampling,
        hash_root=b"",
        tables=tables_from(layout, first_block, num_blocks),
    )


def tables_from(layout: KVLayout, first_block: int, num_entries: int, *, number: int = 0) -> list[Table]:
    """Tables where no pool hands out blocks: in the pool's blocks from the first on, one group after the other.

    What goes on in place is in the pool's last blocks, before those of `number` others.
    """
    tables, end = list[Table](), layout.num_blocks
    for group in groups_of(layout):
        if group.grows:
            blocks = range(first_block, first_block := first_block + num_entries * group.blocks)
        else:
            end -= number * group.blocks
            blocks = range(end - group.blocks, end)
            end -= group.blocks
        table = Table()
        extend(group, table, entries_of(blocks, group.blocks), num_entries)
        tables.append(table)
    return tables
