"""A packed pass is a message: it goes through bytes, and another process computes the same from it."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch.layout import (
    ALIGNMENT,
    FIELDS,
    GraphSize,
    HeadsSize,
    Layout,
    Packed,
    PassSize,
    PromptsSize,
    SinglesSize,
)
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.kernels.attention import HeadShape
from engine.passes import Pass
from engine.sequence import Chunk, Sequence
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.rank import Rank

MODEL = Path(__file__).resolve().parents[3] / "demo"
NUM_BLOCKS = 60

counts = st.integers(0, 9)
singles = st.builds(SinglesSize, places=counts, items=counts, sequences=counts, width=counts, longest=counts)
prompts = st.builds(
    PromptsSize,
    sequences=counts, width=counts, blocks=counts, tiles=counts, max_query_len=counts, max_context_len=counts,
)  # fmt: skip
shapes = st.builds(
    HeadsSize,
    heads=st.builds(HeadShape, counts, counts, counts),
    windows=st.sampled_from([(0,), (7,), (0, 7)]),
    tile_rows=counts,
    tiles_at_once=counts,
)
sizes = st.builds(
    PassSize,
    graph=st.none() | st.builds(GraphSize, decoding=counts, prompts=counts),
    tokens=counts,
    num_sampled=counts,
    sampled_rows=counts,
    attention=st.lists(shapes, min_size=1, max_size=2).map(tuple),
    decode=singles,
    prompts=st.none() | prompts,
    final=singles,
)


@given(size=sizes, seed=st.integers(0, 1000))
def test_fields_lie_apart_and_a_pass_survives_its_bytes(size: PassSize, seed: int) -> None:
    packed = Packed.empty(size)
    written = np.zeros(len(packed.words), dtype=int)
    random = np.random.default_rng(seed)
    for field in FIELDS:
        for copy in range(field.copies(size)):
            view = packed.layout.view(torch.from_numpy(packed.words), field.name, copy)
            assert view.shape == field.shape(size)
            assert view.storage_offset() % ALIGNMENT == 0
            assert bool((view == field.empty).all())
            start = view.storage_offset()
            written[start : start + view.numel()] += 1
            values = random.integers(-(2**31), 2**31, size=tuple(view.shape))
            packed.put(field.name, values, copy=copy)
            assert view.tolist() == values.tolist()
    assert written.max(initial=0) <= 1, "two fields share a word"

    again = Packed.decode(packed.encode())
    assert again.size == size
    assert again.layout.places == packed.layout.places
    assert np.array_equal(again.words, packed.words)


def test_what_is_no_packed_pass_is_refused_with_what_is_wrong() -> None:
    size = PassSize(
        tokens=3,
        num_sampled=1,
        sampled_rows=1,
        attention=(HeadsSize(heads=HeadShape(4, 2, 16), windows=(0,)),),
        decode=SinglesSize(places=3, items=4),
    )
    data = Packed.empty(size).encode()
    with pytest.raises(ValueError, match=r"not a packed pass.*the same release"):
        Packed.decode(data[:-1])
    with pytest.raises(ValueError, match=r"`int` >= 0 - at `\$\[0\]\.tokens`"):
        Packed.decode(data.replace(b"\xa6tokens\x03", b"\xa6tokens\xff"))
    bytes_sent = 4 * Layout(size).words
    bytes_asked = 4 * Layout(msgspec.structs.replace(size, tokens=30)).words
    with pytest.raises(ValueError, match=f"with {bytes_sent} bytes of words, its header asks for {bytes_asked}"):
        Packed.decode(data.replace(b"\xa6tokens\x03", b"\xa6tokens\x1e"))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(model=MODEL, num_threads=1, dtype="float32", cache=CacheConfig(num_blocks=NUM_BLOCKS)))


def test_another_process_computes_the_same_tokens_from_the_bytes(engine: Engine, tmp_path: Path) -> None:
    """Prompts whole and in chunks, decoding beside them and alone, tokens that the host does not know yet."""
    random = torch.Generator().manual_seed(5)
    engine.kv.copy_(torch.randn(engine.kv.shape, generator=random))  # what a pass reads must come from the pool's copy
    cached = new_sequence("cached", list(range(20, 70)), max_tokens=8)
    generator = Generator(engine, chunk_size=24)
    generator.run([cached])
    engine.kv.numpy().tofile(tmp_path / "pool")

    rank = Rank(MODEL, tmp_path / "pool", NUM_BLOCKS)
    compared: list[Packed] = []
    execute = engine._runner.execute

    def both(packed: Packed) -> torch.Tensor | None:
        logits = execute(packed)
        theirs = rank.execute(packed.encode(), engine._newest.tensor.tolist())
        ours = [] if logits is None else logits.float().tolist()
        assert theirs == ours
        compared.append(packed)
        return logits

    engine._runner.execute = both  # type: ignore[method-assign]
    try:
        _overlapping(generator)
    finally:
        del engine._runner.execute  # type: ignore[method-assign]
        rank.end()
    assert {(packed.size.prompts is not None, packed.size.decode.places > 0) for packed in compared} == {
        (True, False), (True, True), (False, True),
    }  # fmt: skip
    assert any((packed.layout.view(torch.from_numpy(packed.words), "sources") >= 0).any() for packed in compared)
    assert any(packed.size.prompts and packed.size.prompts.blocks for packed in compared), "no context behind a chunk"


def _overlapping(generator: Generator) -> None:
    """Two passes in flight: the second begins with tokens that the first samples."""
    prompts = [list(range(20, 70)), list(range(100, 107)), list(range(20, 36)) + list(range(300, 330))]
    sequences = [
        new_sequence(f"r{seed}", prompt, temperature=0.8, seed=seed, max_tokens=8)
        for seed, prompt in enumerate(prompts)
    ]
    in_flight: deque[tuple[list[Chunk], Pass]] = deque()
    for number in range(16):
        if number < 2 * len(sequences) and number % 2 == 0:
            generator.admit(sequences[number // 2])
        chunks = [_next(sequence) for sequence in sequences if _goes_on(sequence)]
        in_flight.append((chunks, generator.launch(chunks)))
        if len(in_flight) == 2:
            generator.deliver(*in_flight.popleft())
    generator.deliver(*in_flight.popleft())
    assert all(sequence.finish_reason() for sequence in sequences)


def _goes_on(sequence: Sequence) -> bool:
    return bool(sequence.tables) and sequence.num_generated + sequence.num_pending < sequence.sampling.max_tokens


def _next(sequence: Sequence) -> Chunk:
    return sequence.schedule(min(sequence.num_unscheduled, 24))
